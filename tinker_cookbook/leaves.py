"""The one way from the core to its leaves: optional features, which the core never imports.

``tests/unit/test_import_structure.py`` has their list. Each leaf's folder can be removed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError


def find_leaf(name: str) -> Any:
    """Returns the module ``tinker_cookbook.NAME``; ``None`` if this installation lacks it."""
    module = f"{__package__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A package that the leaf needs is another problem.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None


def load_leaf(name: str, setting: str) -> Any:
    """Like ``find_leaf``, for a leaf that ``setting`` needs.

    Raises:
        ConfigurationError: this installation lacks the leaf.
    """
    if (found := find_leaf(name)) is None:
        raise ConfigurationError(
            f"{setting} needs {__package__}.{name}, which this installation lacks; leave the "
            "setting out, or install the whole package"
        )
    return found
