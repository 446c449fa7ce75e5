"""Heavy third-party modules that load when they are first used.

``python -m recipes.NAME --help`` must answer at once, yet configs live beside code that needs
torch. A module that needs ``tinker`` (which imports torch) writes::

    if TYPE_CHECKING:
        import tinker
    else:
        tinker = lazy_module("tinker")

and uses ``tinker.Datum`` as usual. ``importlib.util.LazyLoader`` is not used because it locks
submodules out (``tinker.types``) until the parent has been executed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)  # introspection must not load it
        value = getattr(importlib.import_module(self.__name__), attribute)
        setattr(self, attribute, value)
        return value


def lazy_module(name: str) -> Any:
    """Returns a stand-in for module ``name`` that imports it on first attribute access."""
    return _LazyModule(name)


def lazy_exports(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module-level ``__getattr__`` (PEP 562) that imports names on first access.

    A package front re-exports names of its submodules with it and stays fast to import. Type
    checkers need the same imports under ``if TYPE_CHECKING``.

    Args:
        module: ``__name__`` of the module that defines ``__getattr__``.
        places: Name -> module that defines it. A name that maps to ``module.name``, or to
            itself, is that submodule, or library.

    Raises:
        AttributeError: From the returned function, for a name that is not in ``places``.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        place = places.get(name)
        if place is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        loaded = importlib.import_module(place)
        is_module = place in (name, f"{module}.{name}")
        value = loaded if is_module else getattr(loaded, name)
        setattr(importlib.import_module(module), name, value)  # found directly from now on
        return value

    return __getattr__
