"""Lazy imports of heavy modules, and aliases of modules that have moved."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError, install_command

OFFICIAL = "tinker_cookbook.official"


class _LazyModule(ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)  # introspection must not load it
        value = getattr(importlib.import_module(self.__name__), attribute)
        # Later accesses find it directly, without this method.
        setattr(self, attribute, value)
        return value


def lazy_module(name: str) -> Any:
    """Returns a proxy of module ``name``, which is imported on first attribute access."""
    return _LazyModule(name)


def lookup_func(path_to_func: str, default_module: str | None = None) -> Any:
    """Returns the attribute that ``"package.module:name"`` names.

    Args:
        path_to_func: As above, or a bare name of ``default_module``.
        default_module: Module of a bare name.

    Raises:
        ValueError: There is more than one colon, or none and no ``default_module``.
    """
    # From the right: without a colon the whole text is the name.
    module, _, name = path_to_func.rpartition(":")
    module = module or (default_module or "")
    if not module or not name or ":" in module:
        raise ValueError(
            f"path_to_func: got {path_to_func!r}, expected 'package.module:name'"
            + ("" if default_module else " (a bare name needs a default_module)")
        )
    return getattr(importlib.import_module(module), name)


def missing_extra(what: str, error: ImportError, extra: str) -> ConfigurationError:
    """Returns the error that ``what`` needs a package of the optional dependencies ``extra``."""
    package = (error.name or str(error)).partition(".")[0]
    return ConfigurationError(
        f"{what} need the package {package}, which is not installed; run: {install_command(extra)}"
    )


def lazy_exports(module: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module-level ``__getattr__`` (PEP 562) that imports names on first access.

    With it a package re-exports names of its submodules and stays fast to import. Type checkers
    need the same imports under ``if TYPE_CHECKING``.

    Args:
        module: ``__name__`` of the module that defines ``__getattr__``.
        sources: Name -> module that defines it. A name that maps to ``module.name``, or to
            itself, is that submodule, or library.

    A name that is in no source may be one of the official cookbook (``tinker_cookbook.official``).

    Raises:
        AttributeError: From the returned function, for a name that is nowhere.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        source = sources.get(name) or _official_source(module, name)
        if source is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        loaded = importlib.import_module(source)
        is_module = source in (name, f"{module}.{name}")
        value = loaded if is_module else getattr(loaded, name)
        setattr(importlib.import_module(module), name, value)  # later accesses find it directly
        return value

    return __getattr__


def official_names(module: str) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a module whose official names are in the official package.

    The package is loaded when one of these names is first used, so that the core needs none of it.
    """
    return lazy_exports(module, {})


def _official_source(module: str, name: str) -> str | None:
    # Python asks each module for names such as ``__path__``.
    if name.startswith("__"):
        return None
    table: dict[str, dict[str, str]] = importlib.import_module(OFFICIAL).NAMES
    return table.get(module, {}).get(name)


def find_official_modules() -> None:
    """Lets modules be imported by their official paths (``MODULES`` of the official package)."""
    sys.meta_path.insert(0, _OfficialFinder({}))


def alias_package(alias: str, target: str) -> None:
    """Makes ``alias`` and every ``alias.x`` the same modules as ``target`` and ``target.x``."""
    sys.meta_path.insert(0, _AliasFinder({f"{alias}.": f"{target}."}))
    sys.modules[alias] = importlib.import_module(target)


class _AliasFinder(MetaPathFinder):
    def __init__(self, targets: Mapping[str, str]) -> None:
        """A key that ends with a dot is a prefix."""
        self._targets = targets

    def _target(self, name: str) -> str | None:
        for alias, target in self._targets.items():
            if name == alias:
                return target
            if alias.endswith(".") and name.startswith(alias):
                return target + name.removeprefix(alias)
        return None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A name without a target is left to the finders after this one.
        real = self._target(fullname)
        found = importlib.util.find_spec(real) if real else None
        if found is None:
            return None
        spec = ModuleSpec(fullname, _AliasLoader(found), origin=found.origin)
        # Makes the alias of a package a package too, whose submodules can be imported.
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


class _OfficialFinder(_AliasFinder):
    def _target(self, name: str) -> str | None:
        self._targets = importlib.import_module(OFFICIAL).MODULES
        return super()._target(name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("tinker_cookbook.") or fullname == OFFICIAL:
            return None
        # A module that has a file is not an alias. A folder without files is: after an update, a
        # folder of an earlier version may still hold ``__pycache__``.
        file = PathFinder.find_spec(fullname, path)
        if file is not None and file.origin is not None:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.submodule_search_locations is not None:
            # Files of the package would be found first, and be second copies of its modules.
            sys.meta_path.insert(0, _AliasFinder({f"{fullname}.": f"{self._target(fullname)}."}))
        return spec


class _AliasLoader(Loader):
    def __init__(self, target: ModuleSpec) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._target.name)

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just set the alias's spec on the module, which has run already.
        module.__spec__ = self._target

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the module's code, which ``python -m`` runs as ``__main__``."""
        loader = self._target.loader
        return loader.get_code(self._target.name) if loader else None  # type: ignore[attr-defined]


# Libraries that a loop, a renderer or a recipe uses only when it runs; they import them from here.
# Loading tinker takes 1.5 to 2.2 s of CPU, torch 1.1 to 1.7 s, httpx 0.1 s and pebble 0.06 s. None
# is needed for ``--help`` (0.5 s) or to check settings, and a run on a server never needs torch.
if TYPE_CHECKING:
    import httpx as httpx
    import pebble as pebble
    import tinker as tinker
    import torch as torch
else:
    httpx, pebble = lazy_module("httpx"), lazy_module("pebble")
    tinker, torch = lazy_module("tinker"), lazy_module("torch")
