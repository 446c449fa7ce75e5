"""Keeps the old run of a log folder until the new run has written its first row.

``behavior_if_log_dir_exists=delete`` must not lose the old run when the new one fails early, for
example because a data file is missing or the backend does not answer. So the old folder is renamed
to ``.NAME.replaced-TIME-PID`` in the same parent folder. It is removed after the first row of the
new ``metrics.jsonl`` is on the disk, and renamed back if the new run ends before that. After
``kill -9`` the next start on the same folder does the same (:func:`recover`).
"""

from __future__ import annotations

import atexit
import errno
import glob
import os
import shutil
import time
from pathlib import Path

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.record.schema import FOLDER
from tinker_cookbook.run.config import TYPE_KEY
from tinker_cookbook.run.jsonl import free_name
from tinker_cookbook.run.lock import RunLock, lock_holder
from tinker_cookbook.run.paths import (
    CHECKPOINTS_FILE,
    CODE_DIFF_FILE,
    CONFIG_FILE,
    CONFIG_HISTORY_FILE,
    DATA_FILE,
    LOCK_FILE,
    LOG_FILE,
    METRICS_FILE,
)
from tinker_cookbook.utils.command_line.programs import program_command
from tinker_cookbook.utils.terminal import get_console

# Files that a run writes before its first row.
WRITTEN_BEFORE_THE_FIRST_ROW = (
    LOCK_FILE,
    CONFIG_FILE,
    CONFIG_HISTORY_FILE,
    DATA_FILE,
    LOG_FILE,
    CODE_DIFF_FILE,
)
_WITH_ROWS = (METRICS_FILE, CHECKPOINTS_FILE)


# Of each log folder: the folder under its new name, and the lock on it, which the kernel releases
# when this process is killed.
_pending: dict[Path, tuple[Path, RunLock]] = {}


def set_aside(folder: Path) -> None:
    """Renames ``folder`` and creates an empty one in its place.

    Args:
        folder: The old run's folder, resolved; the caller has checked that it may be replaced.

    Raises:
        ConfigurationError: Another run holds the folder, or it cannot be renamed. Nothing changed.
    """
    # The lock belongs to the file, not to its name, so it also protects the renamed folder.
    lock = RunLock(folder)
    lock.__enter__()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    # Time and process id, so that copies of several attempts do not collide.
    aside = free_name(folder.with_name(f".{folder.name}.replaced-{stamp}-{os.getpid()}"))
    # A rename moves the folder in one step, within the same file system.
    try:
        folder.rename(aside)
    except OSError as error:
        lock.release()
        why = "it is a mount point" if error.errno == errno.EBUSY else error.strerror or str(error)
        raise ConfigurationError(
            f"behavior_if_log_dir_exists=delete: {folder} cannot be renamed to {aside.name} "
            f"({why}), and the old run is kept until the new one has started; remove {folder} "
            "yourself, or give another log_path=…"
        ) from error
    folder.mkdir()
    if not _pending:
        atexit.register(_settle_all)
    _pending[folder] = (aside, lock)
    prune = f"{program_command('tinker_cookbook.runs')} prune"
    _print(
        f"the old run in {folder} is kept as {aside} until the new run has its first row; its "
        f"weights stay after that, and `{prune}` removes those on this machine"
    )


def is_pending(log_dir: str | os.PathLike[str]) -> bool:
    """Returns whether this process keeps an old run of ``log_dir``."""
    return bool(_pending) and Path(log_dir).resolve() in _pending


def confirm(log_dir: str | os.PathLike[str]) -> None:
    """Removes the old run of ``log_dir``, if there is one; call it after the first row."""
    # This is called for every row, and there is hardly ever an old run.
    if _pending and (replaced := _pending.pop(Path(log_dir).resolve(), None)) is not None:
        aside, lock = replaced
        _discard(aside)
        lock.release()


def settle(log_dir: str | os.PathLike[str]) -> None:
    """Ends an attempt to replace a run: removes the old run if the new one has a row, otherwise
    restores it. Does nothing if this process keeps no old run of ``log_dir``."""
    folder = Path(log_dir).resolve()
    # Removed from the table first, so that a second call does nothing even if this one fails.
    replaced = _pending.pop(folder, None)
    if replaced is None:
        return
    aside, lock = replaced
    # The lock is held until the folders are renamed: no other run can start in between.
    try:
        _decide(folder, aside)
    finally:
        lock.release()


def recover(log_dir: str | os.PathLike[str]) -> None:
    """Settles what a killed process left for ``log_dir``.

    Raises:
        ConfigurationError: Another process is replacing the run in ``log_dir``.
    """
    folder = Path(log_dir).resolve()
    if folder in _pending or not folder.parent.is_dir():
        return
    name = glob.escape(folder.name)
    # Old runs whose removal was interrupted; they are no longer needed.
    for left in folder.parent.glob(f".{name}.discarded-*"):
        shutil.rmtree(left, ignore_errors=True)
    # The newest first: once it is restored, older ones find a run with rows and are removed.
    for aside in sorted(folder.parent.glob(f".{name}.replaced-*"), reverse=True):
        holder = lock_holder(aside)
        if holder is not None:
            raise ConfigurationError(
                f"log_path={folder} is being started over by another run ({holder}); wait for it, "
                "stop it, or give this run its own log_path=…"
            )
        # A new run that is still going decides itself when it ends.
        if lock_holder(folder) is None:
            _decide(folder, aside)


def has_rows(folder: Path) -> bool:
    """Returns whether a run in ``folder`` has written a row or a checkpoint."""
    return any((folder / n).is_file() and (folder / n).stat().st_size > 0 for n in _WITH_ROWS)


def ended_before_the_first_row(folder: Path) -> bool:
    """Returns whether ``folder`` holds only what a run writes before its first row."""
    # Of the record only the texts of the tokens, which the next start writes again.
    if any((folder / FOLDER).glob("step_*")):
        return False
    names = [entry.name for entry in folder.iterdir() if entry.name != FOLDER]
    return all(name.startswith(WRITTEN_BEFORE_THE_FIRST_ROW) for name in names)


def was_configured_by_a_run(folder: Path) -> bool:
    """Returns whether ``config.json`` in ``folder`` is of a run; model folders have one too."""
    config = folder / CONFIG_FILE
    return config.is_file() and f'"{TYPE_KEY}"' in config.read_text("utf-8", errors="replace")


def _decide(folder: Path, aside: Path) -> None:
    """Keeps either the new run in ``folder`` or the old one in ``aside``."""
    if folder.exists() and has_rows(folder):
        _discard(aside)
        return
    if not folder.exists():
        pass  # the process was killed between the rename and the creation of the new folder
    elif ended_before_the_first_row(folder):
        # Nothing in it is worth keeping: these files are written again at each start.
        shutil.rmtree(folder)
    elif was_configured_by_a_run(folder):
        # For example transcripts of a first iteration that failed, which explain the failure.
        unfinished = free_name(folder.with_name(f"{folder.name}.unfinished"))
        folder.rename(unfinished)
        _print(f"the files of the new run, which ended early, are in {unfinished}")
    else:
        # The program writes no rows, so whether it succeeded is unknown.
        _print(f"the run that was in {folder} before is kept in {aside}; remove it when you like")
        return
    aside.rename(folder)
    _print(f"{folder} holds the old run again: the new one ended before its first row")


def _discard(aside: Path) -> None:
    # Renamed first, so that a partly removed folder is never mistaken for a run.
    gone = aside.with_name(aside.name.replace(".replaced-", ".discarded-"))
    aside.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _settle_all() -> None:
    """Settles the runs of programs that call ``check_log_dir`` and end without ``settle``."""
    for folder in list(_pending):
        settle(folder)


# A forked worker that ends must not settle the runs of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)


def _print(line: str) -> None:
    get_console().print(line, markup=False, highlight=False, soft_wrap=True)
