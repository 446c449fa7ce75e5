"""The one way from the engine to its optional parts in ``extensions``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError


def extension(name: str, setting: str) -> Any:
    """Returns the module ``name`` of ``engine.extensions``, which ``setting`` needs.

    Raises:
        ConfigurationError: this installation has no such module.
    """
    folder = f"{__package__}.extensions"
    try:
        return import_module(f"{folder}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(folder):
            raise
        raise ConfigurationError(
            f"{setting} needs the module {folder}.{name}, which this installation of "
            "tinker_cookbook lacks; leave the setting out, or install the whole package"
        ) from None
