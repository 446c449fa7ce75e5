"""Measures and deletes folders that a program has made: deep, unreadable, changing meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat

_LONGEST_PATH = 3500  # bytes; the kernel takes 4,096


def folder_use(folder: str, most_bytes: int, most_files: int) -> tuple[int, int]:
    """Returns the bytes and the number of the files and folders below a folder.

    It stops counting above the limits. Folders that no path can name count as above the limit.
    """
    size = files = 0
    waiting = [folder]
    while waiting and size <= most_bytes and files <= most_files:
        path = waiting.pop()
        if len(os.fsencode(path)) > _LONGEST_PATH:
            return most_bytes + 1, files  # files could hide there
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return size, files


def remove_folder(folder: str) -> None:
    """Deletes a folder of any depth; what cannot be deleted stays.

    ``shutil.rmtree`` calls itself for each level and keeps a descriptor of each open. Here the
    folders of the second level move to the first, until there is only one level.
    """
    with contextlib.suppress(OSError):
        top = _open(folder)
        try:
            while names := [name for name in os.listdir(top) if _is_folder(name, top)]:
                for name in names:
                    _remove_level(name, top)
            _delete_files(top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _remove_level(name: str, top: int) -> None:
    """Deletes a folder after its own folders were moved to ``top``."""
    inner = _open(name, top)
    try:
        for below in os.listdir(inner):
            if _is_folder(below, inner):
                os.close(_open(below, inner))  # makes it writable: its entry ".." changes
                os.rename(below, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=top)
        _delete_files(inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def _open(name: str, parent: int | None = None) -> int:
    """Opens a folder, never through a link, and gives its owner all rights to it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        opened = os.open(name, flags, dir_fd=parent)
    except PermissionError:  # never for root
        os.chmod(name, 0o700, dir_fd=parent)
        opened = os.open(name, flags, dir_fd=parent)
    with contextlib.suppress(OSError):
        os.fchmod(opened, 0o700)
    return opened


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _delete_files(parent: int) -> None:
    for name in os.listdir(parent):
        if not _is_folder(name, parent):
            os.unlink(name, dir_fd=parent)
