"""Files by relative path: the interface, a local folder, and the file systems of fsspec."""

# ruff: noqa: D102 (the methods of a storage are described in ``Storage``)

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable
from urllib.parse import unquote, urlsplit

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.paths import local_path, write_atomically


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
        return self.path(path).as_uri()

    def read(self, path: str) -> bytes:
        return self.path(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        # Readers see the old content or the new.
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)

    def append(self, path: str, data: bytes) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab", buffering=0) as file:
            file.write(data)

    def exists(self, path: str) -> bool:
        return self.path(path).exists()

    def stat(self, path: str) -> StorageStat | None:
        try:
            found = self.path(path).stat()
        except FileNotFoundError:
            return None
        return StorageStat(found.st_size, found.st_mtime)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        with open(self.path(path), "rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def list_dir(self, prefix: str) -> list[str]:
        folder = self.path(prefix)
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def remove(self, path: str) -> None:
        self.path(path).unlink(missing_ok=True)

    def remove_dir(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self.path(path).rmdir()


@runtime_checkable
class AsyncStorage(Protocol):
    """Async versions of the methods of ``Storage``: ``aread`` of ``read``, and so on."""

    aread: Callable[..., Awaitable[Any]]
    awrite: Callable[..., Awaitable[Any]]
    aappend: Callable[..., Awaitable[Any]]
    aexists: Callable[..., Awaitable[Any]]
    astat: Callable[..., Awaitable[Any]]
    aread_range: Callable[..., Awaitable[Any]]
    alist_dir: Callable[..., Awaitable[Any]]
    aremove: Callable[..., Awaitable[Any]]
    aremove_dir: Callable[..., Awaitable[Any]]

    async def __aenter__(self) -> AsyncStorage: ...

    async def __aexit__(self, *exc: object) -> None: ...


class FsspecStorage(ThreadedStorage):
    """A folder of a file system of fsspec, such as ``s3://`` or ``gs://``.

    Object stores cannot append, so appended bytes are kept in memory until ``flush`` (or the end of
    a ``with`` block) adds them to the file as it is then; reads of this object see them at once.
    Bytes that were not flushed are lost with the process, and are no part of a pickle. Several
    writers may append to one file, but of two that flush it at the same moment the later one wins:
    a file has to be read and uploaded again as a whole, and fsspec has no lock.

    Args:
        fs: The file system, an ``fsspec.AbstractFileSystem``.
        root: Folder in it.
        fs_kwargs: Options of the file system, to open it again from a pickle.
    """

    def __init__(self, fs: Any, root: str = "", **fs_kwargs: Any) -> None:
        self._fs, self._root, self._fs_kwargs = fs, root.rstrip("/"), fs_kwargs
        self._protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        # What follows the uploaded content of a file. Async methods run in several threads.
        self._appended: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    def _name(self, path: str) -> str:
        name = storage_join(path)
        if name == ".." or name.startswith("../"):
            raise outside_storage(path, self._root)
        return name

    def _full(self, name: str) -> str:
        return "/".join(part for part in (self._root, name) if part)

    def url(self, path: str = "") -> str:
        return f"{self._protocol}://{self._full(self._name(path))}"

    def read(self, path: str) -> bytes:
        name = self._name(path)
        with self._lock:
            return self._whole(name)

    def _whole(self, name: str) -> bytes:
        try:
            content = self._fs.cat_file(self._full(name))
        except FileNotFoundError:
            if name not in self._appended:
                raise
            content = b""
        return content + self._appended.get(name, b"")

    def write(self, path: str, data: bytes) -> None:
        name = self._name(path)
        with self._lock:
            self._upload(name, data)
            self._appended.pop(name, None)

    def append(self, path: str, data: bytes) -> None:
        name = self._name(path)
        with self._lock:
            self._appended.setdefault(name, bytearray()).extend(data)

    def exists(self, path: str) -> bool:
        name = self._name(path)
        return name in self._appended or self._fs.exists(self._full(name))

    def stat(self, path: str) -> StorageStat | None:
        name = self._name(path)
        full = self._full(name)
        self._fs.invalidate_cache(full)  # another process may have written since
        try:
            info: dict[str, Any] = self._fs.info(full)
        except FileNotFoundError:
            info = {}
        size = info.get("size")
        with self._lock:
            if name in self._appended:
                size = (size or 0) + len(self._appended[name])
        # Each file system has its own name of the time.
        times = (info.get(key) for key in ("mtime", "LastModified", "last_modified", "created"))
        time = next((t for t in times if isinstance(t, (int, float, datetime))), 0.0)
        seconds = time.timestamp() if isinstance(time, datetime) else float(time)
        return None if size is None else StorageStat(size, seconds)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        name = self._name(path)
        end = None if length is None else offset + length
        with self._lock:
            if name in self._appended:
                return self._whole(name)[offset:end]
        return self._fs.cat_file(self._full(name), start=offset, end=end)

    def list_dir(self, prefix: str) -> list[str]:
        name = self._name(prefix)
        full = self._full(name)
        self._fs.invalidate_cache(full)  # another process may have written since
        try:
            entries = [entry.strip("/") for entry in self._fs.ls(full, detail=False)]
        except FileNotFoundError:
            entries = []
        # Object stores may list the folder itself.
        names = {posixpath.basename(entry) for entry in entries if entry != full.strip("/")}
        start = f"{name}/" if name else ""
        with self._lock:
            appended = [file for file in self._appended if file.startswith(start)]
        return sorted(names | {file[len(start) :].partition("/")[0] for file in appended})

    def remove(self, path: str) -> None:
        name = self._name(path)
        with self._lock:
            self._appended.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._full(name))

    def remove_dir(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._fs.rmdir(self._full(self._name(path)))

    def flush(self) -> None:
        with self._lock:
            for name in list(self._appended):
                self._upload(name, self._whole(name))
                del self._appended[name]

    close = flush

    def _upload(self, name: str, data: bytes) -> None:
        full = self._full(name)
        self._fs.makedirs(posixpath.dirname(full), exist_ok=True)
        self._fs.pipe_file(full, data)

    def __getstate__(self) -> dict[str, Any]:
        return {"protocol": self._protocol, "root": self._root, "fs_kwargs": self._fs_kwargs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import fsspec

        fs = fsspec.filesystem(state["protocol"], **state["fs_kwargs"])
        self.__init__(fs, state["root"], **state["fs_kwargs"])


def storage_from_uri(uri: str, **kwargs: Any) -> Storage:
    """Returns the storage of an address.

    A path and ``file://…`` give a :class:`LocalStorage`, other addresses (``s3://``, ``gs://``,
    ``memory://``) a :class:`FsspecStorage`. ``kwargs`` are options of the file system, such as
    ``anon=True`` for public buckets. Raises ImportError where the file system's package is missing.
    """
    if uri.startswith("file://"):
        return LocalStorage(unquote(urlsplit(uri).path))
    if "://" not in uri:
        return LocalStorage(uri)
    # Comes with the package datasets, which this package needs anyway.
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(uri, **kwargs)
    return FsspecStorage(fs, path, **kwargs)


def storage_join(*parts: str) -> str:
    """Joins parts of a path with slashes, without empty parts, and resolves ``.`` and ``..``."""
    joined = "/".join(filter(None, (part.strip("/") for part in parts)))
    return posixpath.normpath(joined) if joined else ""


def outside_storage(path: str, root: object) -> ConfigurationError:
    """Returns the error of a path that leaves the storage."""
    return ConfigurationError(f"path: {path!r} escapes the storage, expected a path inside {root}")
