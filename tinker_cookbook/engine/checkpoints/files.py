"""Atomic writes of folders, and the lock for a single writer.

A folder ``NAME`` is replaced in four steps, each durable before the next begins::

    .NAME.new-TAG   written, files and folder fsynced
    NAME            -> .NAME.old-TAG
    .NAME.new-TAG   -> NAME
    .NAME.old-TAG   -> .NAME.gone-TAG, deleted

A crash after the second step leaves no ``NAME`` but a complete ``.old`` (``.gone`` is what may be
half deleted); ``recover`` renames it back. A crash anywhere else leaves ``NAME`` as it was or as it
was meant to be, and ``recover`` deletes the rest. Folders of a running writer are never taken for
leftovers, because writers hold the run's lock, which the kernel releases when a process dies.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinker_cookbook.exceptions import CheckpointError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

LOCK_TIMEOUT = 120.0
"""Seconds to wait for another writer of the same run."""

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<role>new|old|gone)-[0-9a-f]{8}")
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def explain_disk_errors(doing: str, root: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a ``CheckpointError`` that states which data is safe."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            cause = f"the disk is full ({_free_bytes(root)} bytes free under {root})"
            advice = "Free some space, or set TINKER_COOKBOOK_HOME to a folder on another disk"
        elif error.errno in _NOT_WRITABLE:
            cause = f"{error.filename or root} cannot be written to ({error.strerror})"
            advice = "Change its permissions, or set TINKER_COOKBOOK_HOME to a folder of your own"
        else:
            cause = str(error)
            advice = f"Check the disk that holds {root}"
        raise CheckpointError(
            f"{doing}: {cause}; checkpoints saved before are intact. {advice}, then resume."
        ) from error


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file and syncs it to disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: after a crash it has the old or the new content."""
    temporary = _beside(path, "new")
    try:
        write_durably(temporary, content)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_folder(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Replaces the folder ``path`` by one with ``files`` (name, content). Requires the lock.

    ``files`` may be a generator, so that only one content is in memory at a time.

    On any error the previous folder at ``path`` is unchanged, and temporary files are deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = _beside(path, "new"), _beside(path, "old")
    try:
        new.mkdir()
        for name, content in files:
            write_durably(new / name, content)
        sync_folder(new)
        if path.exists():
            os.rename(path, old)
            sync_folder(path.parent)
        os.rename(new, path)
        sync_folder(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            os.rename(old, path)
        shutil.rmtree(new, ignore_errors=True)
        raise
    if old.exists():
        _delete_as(old, _beside(path, "gone"))


def delete_folder(path: Path) -> None:
    """Deletes a folder atomically. Requires the lock."""
    _delete_as(path, _beside(path, "gone"))


def leftovers(parent: Path) -> list[Path]:
    """Returns temporary folders in ``parent``; their writers have crashed unless the lock is
    held."""
    try:
        with os.scandir(parent) as entries:
            return sorted(Path(e.path) for e in entries if _LEFTOVER.fullmatch(e.name))
    except FileNotFoundError:
        return []


def recover(parent: Path) -> None:
    """Completes or reverts unfinished writes of crashed writers in ``parent``. Requires the
    lock."""
    for path in leftovers(parent):
        match = _LEFTOVER.fullmatch(path.name)
        if match and match["role"] == "old" and not (parent / match["name"]).exists():
            os.rename(path, parent / match["name"])
            sync_folder(parent)
            logger.warning("Restored %s, whose replacement was interrupted", parent / match["name"])
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Syncs renames inside ``path`` to disk."""
    if sys.platform == "win32":  # Windows offers no handle for a folder and orders renames itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def folder_lock(folder: Path, *, exclusive: bool, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Holds ``folder/.lock``, shared for readers or exclusive for a writer.

    The lock is advisory, works across threads and processes, and ends with the process. Readers of
    a read-only store, or of a file system without locks, continue without it.

    Raises:
        CheckpointError: another process kept the lock for ``timeout`` seconds.
    """
    if sys.platform == "win32":
        yield  # no flock; two processes on one run are then up to the user
        return
    handle = _open_lock(folder / ".lock", exclusive)
    if handle is None:
        yield
        return
    try:
        _wait_for(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, folder, timeout)
        yield
    finally:
        os.close(handle)


def _open_lock(path: Path, exclusive: bool) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if exclusive or error.errno not in _NOT_WRITABLE:
            raise
        return None


def _wait_for(handle: int, mode: int, folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(handle, mode | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"{folder}: another process has been writing to this run for {timeout:g} s, "
                    "expected a moment. End it, or wait for it, and try again."
                ) from None
            time.sleep(0.01)
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                return
            raise


def _free_bytes(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _delete_as(path: Path, gone: Path) -> None:
    os.rename(path, gone)
    sync_folder(path.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}-{secrets.token_hex(4)}")
