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
