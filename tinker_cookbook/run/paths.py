"""Names of the files of a run's folder, checks of folders in settings, and atomic writes."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from tinker_cookbook.exceptions import ConfigurationError

CHECKPOINTS_FILE = "checkpoints.jsonl"
CODE_DIFF_FILE = "code.diff"
CONFIG_FILE = "config.json"
CONFIG_HISTORY_FILE = "config.history.jsonl"
DATA_FILE = "data_record.json"
EVENTS_FILE = "trace_events.jsonl"
LOCK_FILE = ".lock"
LOG_FILE = "logs.log"
METRICS_FILE = "metrics.jsonl"
SPANS_FILE = "timing_spans.jsonl"

# Two letters at least, so that a Windows drive ("C:/runs") is not a scheme. One slash is enough:
# pathlib folds the second one away, and a path that was folded must not pass as a folder "s3:".
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(value: str | os.PathLike[str], field: str = "log_path") -> Path:
    """Returns ``value`` as a path on this machine, with ``~`` expanded.

    Args:
        value: The user's setting.
        field: Name of the setting, for errors.

    Raises:
        ConfigurationError: ``value`` is empty or a URL such as ``s3://bucket/run``.
    """
    text = os.fspath(value)
    if not text.strip():
        raise ConfigurationError(
            f"{field} is empty; expected a folder, e.g. {field}=/tmp/tinker-examples/my_run"
        )
    if _URL.match(text):
        raise ConfigurationError(
            f"{field}={text} is a URL, but only folders on this machine "
            f"(or mounted on it) can be used; give a local path and copy the folder when the "
            f"run is done"
        )
    return Path(text).expanduser()


def ensure_writable_dir(value: str | os.PathLike[str], field: str = "log_path") -> Path:
    """Creates the folder if it is missing and checks by a write that it is writable.

    Permission bits are not enough (root, quotas, read-only mounts, full disks).

    Raises:
        ConfigurationError: The folder cannot be created or written; gives the system's reason.
    """
    path = local_path(value, field)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A real write, since a disk that is full or read-only shows only then.
        with tempfile.NamedTemporaryFile(dir=path, prefix=".write_probe_") as probe:
            probe.write(b"probe\n")
            probe.flush()
    except OSError as error:
        raise ConfigurationError(
            f"{field}={path} cannot be written: {error.strerror or error}; choose another folder "
            f"with {field}=… or free this one"
        ) from error
    return path


def write_atomically(path: Path, content: bytes | memoryview, durable: bool = True) -> None:
    """Writes bytes so that a crash leaves the old content or the new, never a part.

    After a power cut a file that is not ``durable`` may be empty.

    Raises:
        OSError: The folder cannot be written; the old file is intact.
    """
    # In the same folder, since a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                # On the disk before the rename: after a power cut the new name could have no
                # content.
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def folder_size(folder: Path) -> int:
    """Returns the bytes of all files in a folder; links are not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # deleted meanwhile
                continue
    return total


def existing_parent(path: Path) -> Path:
    """Returns the nearest folder that exists, whose disk a new folder would be on."""
    return next(one for one in (path, *path.parents) if one.exists())
