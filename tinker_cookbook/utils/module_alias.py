"""A second name for a module or a package: both names give the same module object."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


def alias_package(alias: str, target: str) -> None:
    """Makes ``alias`` and every ``alias.x`` the same modules as ``target`` and ``target.x``."""
    sys.meta_path.insert(0, _AliasFinder({f"{alias}.": f"{target}."}))
    sys.modules[alias] = importlib.import_module(target)


def alias_modules(targets: Mapping[str, str]) -> None:
    """Makes each key of ``targets`` a second name of the module that is its value."""
    sys.meta_path.insert(0, _AliasFinder(targets))


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
        real = self._target(fullname)
        found = importlib.util.find_spec(real) if real else None
        if found is None:
            return None
        spec = ModuleSpec(fullname, _AliasLoader(found), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
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
        """The module's code, which ``python -m`` runs as ``__main__``."""
        loader = self._target.loader
        return loader.get_code(self._target.name) if loader else None  # type: ignore[attr-defined]
