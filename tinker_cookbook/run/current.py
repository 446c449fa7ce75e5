"""Folder and step of the run in progress, for code that is not given them as arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_folder: ContextVar[Path | None] = ContextVar("run_folder", default=None)
_step: ContextVar[int] = ContextVar("run_step", default=0)


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


@contextmanager
def evaluation_at_step(step: int) -> Iterator[None]:
    """Makes ``step`` the number of updates in the weights that the block evaluates."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> int:
    """Returns the number of updates in the weights that an evaluator of a run is given."""
    return _step.get()
