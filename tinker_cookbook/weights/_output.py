"""Atomic output: writes an export completely or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinker_cookbook.exceptions import ConfigurationError, WeightsError
from tinker_cookbook.run.paths import local_path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXT = re.compile(r"No space left on device|^\d+ requested and \d+ written$")
_ROLES = ("part", "old", "base")
"""Suffixes of temporary files and folders."""


class OutputExistsError(ConfigurationError, FileExistsError):
    """The output folder exists and must not be replaced."""

    __str__ = Exception.__str__


def check_output(out: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Returns the output folder as an absolute path; call this before any work.

    Raises:
        OutputExistsError: The folder exists, is not empty, and ``overwrite`` is false.
    """
    path = local_path(out, "out").absolute()
    if path.is_dir() and not any(path.iterdir()):
        return path
    if path.exists() and not (overwrite and path.is_dir()):
        raise OutputExistsError(
            f"out: {path} exists already; choose another folder, or set overwrite=True to replace "
            "it once the new export is complete"
        )
    return path


def temporary_path(out: Path, role: str) -> Path:
    """Returns a path next to ``out``. If this process is killed, the next export deletes it."""
    return out.with_name(f".{out.name}.{role}")


def _restore(out: Path) -> None:
    """Restores the previous export after a stop between the two renames; deletes other temporary
    paths."""
    if (old := temporary_path(out, "old")).exists() and not out.exists():
        os.rename(old, out)
    for role in _ROLES:
        _delete(temporary_path(out, role))


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder next to ``out``, and renames it to ``out`` at the end.

    After an error, ``out`` is unchanged and the new folder is deleted.

    Raises:
        WeightsError: The disk is full or cannot be written.
    """
    with _new_output(out) as part:
        part.mkdir()
        yield part


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Like ``new_folder``, for a file, which the block creates."""
    with _new_output(out) as part:
        yield part
        # Flush to disk before the rename: otherwise a power failure could leave an empty file.
        with open(part, "rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _new_output(out: Path) -> Iterator[Path]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _restore(out)
        yield (part := temporary_path(out, "part"))
        # A rename cannot replace a non-empty folder, so move the previous export aside first.
        if out.is_dir():
            os.rename(out, temporary_path(out, "old"))
        os.replace(part, out)
    except BaseException as error:
        # Also for KeyboardInterrupt: between the two renames, no folder has the final name.
        _restore(out)
        # safetensors raises its own error type with the system's message, and numpy an OSError
        # without a number if it could write only a part.
        is_full = isinstance(error, OSError) and error.errno in _FULL
        if is_full or _FULL_TEXT.search(str(error)):
            free = shutil.disk_usage(out.parent).free
            raise WeightsError(
                f"{out}: the disk is full ({free / 2**20:.0f} MiB free without the new export); "
                "nothing there has changed. Free some space or choose another folder with out=…"
            ) from error
        raise
    _delete(temporary_path(out, "old"))
