"""Writes an export completely or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinker_cookbook.exceptions import ConfigurationError, WeightsError
from tinker_cookbook.utils.run_folder.paths import local_path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class OutputExistsError(ConfigurationError, FileExistsError):
    """The output folder exists and must not be replaced."""

    __str__ = Exception.__str__


def check_output(out: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Returns the output folder as an absolute path; call it before any work is done.

    Raises:
        OutputExistsError: It exists, is not empty, and ``overwrite`` is false.
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


def _clean_up(out: Path) -> None:
    """Restores or deletes what killed processes have left next to ``out``."""
    for left in out.parent.glob(f".{out.name}.*"):
        name, pid, role = left.name.rpartition(".")[0], *left.name.split(".")[-2:]
        if name != f".{out.name}.{pid}" or role not in ("part", "old") or _is_running(pid):
            continue
        # Killed between the two renames: the previous export gets its name back.
        if role == "old" and not out.exists():
            os.rename(left, out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _is_running(pid: str) -> bool:
    if not pid.isdecimal():  # no name of ours
        return True
    if int(pid) == os.getpid():  # of a process that had this id before
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder next to ``out``, and gives it the name ``out`` at the end.

    After an error ``out`` is as it was before, and the new folder is deleted.

    Raises:
        WeightsError: The disk is full or cannot be written.
    """
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(out)
        part.mkdir()
        yield part
        # No rename replaces a folder that has content, so the previous export moves aside first.
        if out.exists():
            os.rename(out, old)
        os.rename(part, out)
    except BaseException as error:
        # Also for KeyboardInterrupt: between the two renames no folder has the final name.
        if old.exists() and not out.exists():
            os.rename(old, out)
        shutil.rmtree(part, ignore_errors=True)
        # safetensors raises an error of its own, which has the system's message.
        is_full = isinstance(error, OSError) and error.errno in _FULL
        if is_full or "No space left on device" in str(error):
            free = shutil.disk_usage(out.parent).free
            raise WeightsError(
                f"{out}: the disk is full ({free / 2**20:.0f} MiB free without the new export); "
                "nothing was changed there. Free some space or choose another folder with out=…"
            ) from error
        raise
    shutil.rmtree(old, ignore_errors=True)
