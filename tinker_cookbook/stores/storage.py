"""Files by relative path: the interface, a local folder, and the file systems of fsspec."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)


@dataclass(frozen=True)
class StorageStat:
    """Size in bytes, and time of the last change in seconds since 1970."""

    size: int
    mtime: float


@runtime_checkable
class Storage(Protocol):
    """Files by slash-separated path relative to a root; can be pickled."""

    def url(self, path: str = "") -> str:
        """Returns the address of a file."""
        ...

    def read(self, path: str) -> bytes:
        """Returns a file's content; raises FileNotFoundError."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Writes a whole file."""
        ...

    def append(self, path: str, data: bytes) -> None:
        """Appends bytes in a single write."""
        ...

    def exists(self, path: str) -> bool:
        """Returns whether there is such a file or folder."""
        ...

    def stat(self, path: str) -> StorageStat | None:
        """Returns size and time, ``None`` if there is no file."""
        ...

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """Returns ``length`` bytes from ``offset``; ``None``: all up to the end."""
        ...

    def list_dir(self, prefix: str) -> list[str]:
        """Returns the names in a folder, sorted; empty if there is no folder."""
        ...

    def remove(self, path: str) -> None:
        """Deletes a file, if there is one."""
        ...

    def remove_dir(self, path: str) -> None:
        """Deletes a folder if it is empty."""
        ...

    def flush(self) -> None:
        """Waits until everything is written."""
        ...

    def __enter__(self) -> Storage: ...

    def __exit__(self, *exc: object) -> None: ...


def threaded(method: str) -> Any:
    """Returns an asynchronous method that runs ``method`` in a thread."""

    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self, method), *args, **kwargs)

    return run


class ThreadedStorage(Storage):
    """Base of the storages below: async methods in threads, and the context manager."""

    def flush(self) -> None:
        """Does nothing: each write is complete when it returns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.flush()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.flush)

    aread, awrite, aappend = threaded("read"), threaded("write"), threaded("append")
    aexists, astat = threaded("exists"), threaded("stat")
    aread_range, alist_dir = threaded("read_range"), threaded("list_dir")
    aremove, aremove_dir = threaded("remove"), threaded("remove_dir")


class LocalStorage(ThreadedStorage):
    """A folder on this machine."""

    def __init__(self, root: str | os.PathLike[str], *, mkdir: bool = True) -> None:
        self._root = local_path(root, "root").resolve()
        if mkdir:
            self._root.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        """The folder, as an absolute path."""
        return self._root

    def path(self, path: str = "") -> Path:
        """Returns a file's path on this machine; raises ConfigurationError outside the root."""
        found = (self._root / path).resolve()
        # A name such as ../x must not reach files outside the store.
        if not found.is_relative_to(self._root):
            raise outside_storage(path, self._root)
        return found

    def url(self, path: str = "") -> str:
        """Returns the ``file://`` address of a file."""
        return self.path(path).as_uri()

    def read(self, path: str) -> bytes:
        """Returns a file's content; raises FileNotFoundError."""
        return self.path(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Writes a file atomically: readers see the old content or the new."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)

    def append(self, path: str, data: bytes) -> None:
        """Appends bytes in a single write."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab", buffering=0) as file:
            file.write(data)

    def exists(self, path: str) -> bool:
        """Returns whether there is such a file or folder."""
        return self.path(path).exists()

    def stat(self, path: str) -> StorageStat | None:
        """Returns size and time, ``None`` if there is no file."""
        try:
            found = self.path(path).stat()
        except FileNotFoundError:
            return None
        return StorageStat(found.st_size, found.st_mtime)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """Returns ``length`` bytes from ``offset``; ``None``: all up to the end."""
        with open(self.path(path), "rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def list_dir(self, prefix: str) -> list[str]:
        """Returns the names in a folder, sorted; empty if there is no folder."""
        folder = self.path(prefix)
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def remove(self, path: str) -> None:
        """Deletes a file, if there is one."""
        self.path(path).unlink(missing_ok=True)

    def remove_dir(self, path: str) -> None:
        """Deletes a folder if it is empty."""
        with contextlib.suppress(OSError):
            self.path(path).rmdir()


def storage_join(*parts: str) -> str:
    """Joins parts of a path with slashes, without empty parts, and resolves ``.`` and ``..``."""
    joined = "/".join(filter(None, (part.strip("/") for part in parts)))
    return posixpath.normpath(joined) if joined else ""


def outside_storage(path: str, root: object) -> ConfigurationError:
    """Returns the error of a path that leaves the storage."""
    return ConfigurationError(f"path: {path!r} escapes the storage, expected a path inside {root}")
