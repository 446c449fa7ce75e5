"""Interface of a file storage with relative paths, and its implementation in a local folder."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.run_folder.paths import local_path, write_atomically


@dataclass(frozen=True)
class StorageStat:
    """Size in bytes, and time of the last change in seconds since 1970."""

    size: int
    mtime: float


@runtime_checkable
class Storage(Protocol):
    """Files by slash-separated path relative to a root."""

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
        """Deletes a folder with all its files, if there is one."""
        ...

    def flush(self) -> None:
        """Waits until everything is written."""
        ...


class LocalStorage:
    """A folder on this machine."""

    def __init__(self, root: str | os.PathLike[str], mkdir: bool = True) -> None:
        self._root = local_path(root, "root")
        if mkdir:
            self._root.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    def _path(self, path: str) -> Path:
        found = self._root / path
        # A name such as ../x must not reach files outside the store.
        if not found.resolve().is_relative_to(self._root.resolve()):
            raise ConfigurationError(f"path: got {path!r}, expected a path inside {self._root}")
        return found

    def url(self, path: str = "") -> str:
        """Returns the path on this machine."""
        return str(self._path(path))

    def read(self, path: str) -> bytes:
        """Returns a file's content; raises FileNotFoundError."""
        return self._path(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Writes a file atomically: readers see the old content or the new."""
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)

    def append(self, path: str, data: bytes) -> None:
        """Appends bytes in a single write."""
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab", buffering=0) as file:
            file.write(data)

    def exists(self, path: str) -> bool:
        """Returns whether there is such a file or folder."""
        return self._path(path).exists()

    def stat(self, path: str) -> StorageStat | None:
        """Returns size and time, ``None`` if there is no file."""
        try:
            found = self._path(path).stat()
        except FileNotFoundError:
            return None
        return StorageStat(found.st_size, found.st_mtime)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """Returns ``length`` bytes from ``offset``; ``None``: all up to the end."""
        with open(self._path(path), "rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def list_dir(self, prefix: str) -> list[str]:
        """Returns the names in a folder, sorted; empty if there is no folder."""
        folder = self._path(prefix)
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def remove(self, path: str) -> None:
        """Deletes a file, if there is one."""
        self._path(path).unlink(missing_ok=True)

    def remove_dir(self, path: str) -> None:
        """Deletes a folder with all its files, if there is one."""
        target = self._path(path)
        if target.is_dir():
            shutil.rmtree(target)

    def flush(self) -> None:
        """Does nothing: each write is complete when it returns."""

    # Async versions of the methods above, in a thread.

    async def aread(self, path: str) -> bytes:
        """Async version of ``read``."""
        return await asyncio.to_thread(self.read, path)

    async def awrite(self, path: str, data: bytes) -> None:
        """Async version of ``write``."""
        await asyncio.to_thread(self.write, path, data)

    async def aappend(self, path: str, data: bytes) -> None:
        """Async version of ``append``."""
        await asyncio.to_thread(self.append, path, data)

    async def aexists(self, path: str) -> bool:
        """Async version of ``exists``."""
        return await asyncio.to_thread(self.exists, path)

    async def astat(self, path: str) -> StorageStat | None:
        """Async version of ``stat``."""
        return await asyncio.to_thread(self.stat, path)

    async def aread_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """Async version of ``read_range``."""
        return await asyncio.to_thread(self.read_range, path, offset, length)

    async def alist_dir(self, prefix: str) -> list[str]:
        """Async version of ``list_dir``."""
        return await asyncio.to_thread(self.list_dir, prefix)

    async def aremove(self, path: str) -> None:
        """Async version of ``remove``."""
        await asyncio.to_thread(self.remove, path)

    async def aremove_dir(self, path: str) -> None:
        """Async version of ``remove_dir``."""
        await asyncio.to_thread(self.remove_dir, path)


def storage_join(*parts: str) -> str:
    """Joins parts of a path with single slashes; skips empty parts."""
    return "/".join(part.strip("/") for part in parts if part.strip("/"))
