"""Folders for TINKER_COOKBOOK_HOME."""

from __future__ import annotations

from pathlib import Path

_KERNELS = Path("~/.cache/tinker_cookbook_tests/native").expanduser()


def new_home(folder: Path) -> str:
    """Makes ``folder`` the home of programs; compiled kernels are shared by all homes.

    Without that, the first process of each home compiles them for five seconds.
    """
    _KERNELS.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "native").exists():
        (folder / "native").symlink_to(_KERNELS)
    return str(folder)
