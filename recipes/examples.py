"""The data that the recipes' defaults run on; they are installed with the recipes."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent / "example_data"


def example_data(name: str) -> Path:
    """Path of a file in ``recipes/example_data``, in a checkout as in an installed package."""
    return _FOLDER / name
