"""The folder of the run that is in progress, for what writes into it without being given it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_folder: ContextVar[Path | None] = ContextVar("run_folder", default=None)


@contextmanager
def run_in_folder(log_path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes ``log_path`` the run's folder for the block and the tasks that it starts."""
    token = _folder.set(Path(log_path).expanduser())
    try:
        yield
    finally:
        _folder.reset(token)


def current_run_folder() -> Path | None:
    """Returns the folder of the run in progress, None outside of a run."""
    return _folder.get()
