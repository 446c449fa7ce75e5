"""Says what to do where the package is in a checkout, but this Python does not have it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_REQUIRED = "chz"


def check_installed() -> None:
    """Ends a program, or raises ModuleNotFoundError for an import, if a dependency is missing."""
    if find_spec(_REQUIRED) is not None:
        return
    checkout = Path(__file__).resolve().parents[1]
    python = checkout / ".venv" / "bin" / "python"
    remedy = (
        f"start the program with {python}"
        if python.exists()
        else f"run: make -C {checkout} install, then start the program with {python}"
    )
    message = f"{sys.executable} does not have tinker_cookbook's dependencies; {remedy}"
    # While `python -m NAME` looks for NAME, which imports the packages around it.
    if sys.argv[:1] == ["-m"]:
        sys.exit(message)
    raise ModuleNotFoundError(message, name=_REQUIRED)
