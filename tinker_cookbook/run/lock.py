"""A lock that keeps two runs out of one log folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakSet

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.paths import LOCK_FILE, ensure_writable_dir, local_path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

_TRIES = 3
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Holds ``log_path/.lock`` while the ``with`` block runs; ``field`` names the folder's setting.

    Two runs in one folder would interleave their rows and overwrite each other's checkpoints. The
    kernel releases the lock (``flock``) when its process ends, even by ``kill -9``. The file
    remains; it names the last holder.

    Raises:
        ConfigurationError: Another process holds the folder; names its pid and what to do.
    """

    def __init__(self, log_path: str | os.PathLike[str], field: str = "log_path") -> None:
        self.log_path, self._field = local_path(log_path, field), field
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        path = ensure_writable_dir(self.log_path, self._field) / LOCK_FILE
        # Not truncated when it is opened: the record of another holder must stay readable.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        # A look of lock_holder takes the lock for a moment, so one failure says nothing.
        if not any(_try_lock(descriptor) or time.sleep(0.05) for _ in range(_TRIES)):
            holder = _describe(descriptor)
            os.close(descriptor)
            raise ConfigurationError(
                f"{self._field}={self.log_path} is in use by another run ({holder}); wait for it, "
                f"stop it, or give this run its own {self._field}=…"
            )
        self._descriptor = descriptor
        _held.add(self)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        record = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        # Written only after the lock is held, so that a record is never another run's.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(record) + "\n").encode(), 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Releases the folder; safe to call twice."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            _held.discard(self)
            # An explicit unlock also covers file descriptors that a child process shares.
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def lock_holder(log_path: str | os.PathLike[str]) -> str | None:
    """Describes the process that holds ``log_path``, or returns ``None`` if it is free."""
    path = Path(log_path) / LOCK_FILE
    try:
        # Without O_CREAT: this check must not create a lock file. Read-only, because the folder may
        # be another user's.
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return "unknown: its lock cannot be read"
    except OSError:
        return None
    try:
        # flock has no query, so the lock is taken for a moment; closing the file releases it.
        return None if _try_lock(descriptor, shared=True) else _describe(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, shared: bool = False) -> bool:
    if fcntl is None:
        logger.warning("this system has no flock: two runs on one log_path are not noticed")
        return True
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems have no locks; a run there must be possible nevertheless.
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning("log_path is on a file system without locks: two runs are not noticed")
    return True


def _describe(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return f"pid {record['pid']} on {record['host']}, started {record['started']}"
    except (ValueError, KeyError, TypeError):  # the holder is still writing it
        return "pid unknown, just starting"


# A forked worker shares the lock with its parent and would hold it after the parent is killed.
_held: WeakSet[RunLock] = WeakSet()


def _forget_all_in_child() -> None:
    for lock in list(_held):
        if lock._descriptor is not None:
            os.close(lock._descriptor)
            lock._descriptor = None
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all_in_child)
