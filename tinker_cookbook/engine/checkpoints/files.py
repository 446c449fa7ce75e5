"""Atomic writes of files and folders, and the lock for a single writer.

A folder ``NAME`` is replaced in four steps, each durable before the next begins::

    .NAME.new-TAG   written, files and folder fsynced
    NAME            -> .NAME.old-TAG
    .NAME.new-TAG   -> NAME
    .NAME.old-TAG   -> .NAME.gone-TAG, deleted

A crash after the second step leaves no ``NAME`` but a complete ``.old``; ``recover`` renames it
back. A crash anywhere else leaves ``NAME`` with its old or its new content, and ``recover`` deletes
the rest. ``recover`` never deletes folders of a running writer, because writers hold the run's
lock, which the kernel releases when a process dies.
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
    """Converts an ``OSError`` to a ``CheckpointError`` that states which data are safe."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            # The store's folder may not exist yet, so use the disk of its nearest existing parent.
            existing = next(path for path in (root, *root.parents) if path.exists())
            free = shutil.disk_usage(existing).free
            cause = f"the disk is full ({free} bytes free under {root})"
            advice = "Free some space, or set TINKER_COOKBOOK_HOME to a folder on another disk"
        elif error.errno in _NOT_WRITABLE:
            cause = f"{error.filename or root} cannot be written to ({error.strerror})"
            advice = "Change its permissions, or set TINKER_COOKBOOK_HOME to another folder"
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
        # ``flush`` writes Python's buffer to the system, ``fsync`` the system's buffer to the disk.
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: after a crash it has the old or the new content. Requires the
    lock."""
    temporary = _temporary(path, "new")
    try:
        write_durably(temporary, content)
        # Only complete content gets the final name. The folder is synced so that a power failure
        # cannot undo the rename.
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_folder(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Replaces the folder ``path`` by one with ``files`` (name, content). Requires the lock.

    ``files`` may be a generator, so that only one file is in memory at a time. On any error, the
    previous folder at ``path`` is unchanged, and temporary files are deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = _temporary(path, "new"), _temporary(path, "old")
    try:
        # 1. Write a temporary folder. Its files and its entries reach the disk before the rename
        #    below, or a power failure could leave NAME with empty files.
        new.mkdir()
        for name, content in files:
            write_durably(new / name, content)
        sync_folder(new)
        # 2. Move the previous folder aside, because a rename cannot replace a non-empty folder.
        if path.exists():
            os.rename(path, old)
            sync_folder(path.parent)
        # 3. The rename makes the complete new folder visible.
        os.rename(new, path)
        sync_folder(path.parent)
    except BaseException:
        # Also for KeyboardInterrupt: between steps 2 and 3, no folder has the final name.
        if old.exists() and not path.exists():
            os.rename(old, path)
        shutil.rmtree(new, ignore_errors=True)
        raise
    # 4. Delete the previous folder under a name that ``recover`` never restores: a crash
    #    during the deletion leaves it incomplete.
    if old.exists():
        _delete(old, _temporary(path, "gone"))


def delete_folder(path: Path) -> None:
    """Deletes a folder atomically. Requires the lock."""
    _delete(path, _temporary(path, "gone"))


def leftovers(parent: Path) -> list[Path]:
    """Returns temporary folders in ``parent``; their writers have crashed unless the lock is
    held."""
    return sorted(path for path in parent.glob(".*") if _LEFTOVER.fullmatch(path.name))


def recover(parent: Path) -> None:
    """Completes or reverts unfinished writes of crashed writers in ``parent``. Requires the
    lock."""
    for path in leftovers(parent):
        match = _LEFTOVER.fullmatch(path.name)
        # The crash was between steps 2 and 3: restore the previous folder.
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
    if sys.platform == "win32":  # Windows has no handle for folders and orders renames itself
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
        yield  # without flock, the user must not start two processes on one run
        return
    try:
        # Closed on exec, or a child process would keep the lock after this process has ended.
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if exclusive or error.errno not in _NOT_WRITABLE:
            raise
        handle = None
    if handle is None:
        yield
        return
    try:
        mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        deadline = time.monotonic() + timeout
        # ``flock`` has no timeout, so try the lock until the deadline.
        while True:
            try:
                fcntl.flock(handle, mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{folder}: another process has been writing to this run for "
                        f"{timeout:g} s, expected a moment. End it, or wait for it, and try again."
                    ) from None
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                break
        yield
    finally:
        os.close(handle)


def _delete(path: Path, gone: Path) -> None:
    # The rename is the atomic deletion: a crash during ``rmtree`` leaves only a temporary folder.
    os.rename(path, gone)
    sync_folder(path.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _temporary(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}-{secrets.token_hex(4)}")
