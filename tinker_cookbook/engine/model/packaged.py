"""Models that can be obtained without the Hub: a registry that other packages fill."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast


class PackagedModel(Protocol):
    """A module that makes a local copy of one model."""

    NOTE: str
    """What the copy is, and how it differs from the original."""

    @staticmethod
    def finished_copy(models_dir: Path) -> Path | None:
        """Returns the folder of a finished copy under ``models_dir``, or ``None``."""

    @staticmethod
    def make_copy(models_dir: Path) -> Path:
        """Makes the copy where it is absent; returns its folder."""
        ...


_MODULES: dict[str, str] = {}


def register_packaged_model(name: str, module: str) -> None:
    """Registers ``module`` as the source of the model ``name``; it is imported at its first use."""
    _MODULES[name] = module


def packaged_model(name: str) -> PackagedModel | None:
    """Returns the registered source of ``name``, or ``None``."""
    return cast(PackagedModel, import_module(_MODULES[name])) if name in _MODULES else None
