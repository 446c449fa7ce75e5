"""JSON lines that survive ``kill -9``: one row a line, each written by one call.

The newline is the last byte of a row, so a process killed in mid-write leaves a last line without
one. Only that line may be dropped silently; a broken line elsewhere means that another program
wrote to the file.

JSON has no NaN or infinity, and readers (pandas, JavaScript, jq) fail on a file that has them. They
are written as ``null``, which pandas reads as NaN, and a ``"nonfinite"`` entry keeps their values:
``{"loss": null, "nonfinite": {"loss": "inf"}}``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, TrainingError
from tinker_cookbook.run.paths import write_atomically

Row = dict[str, Any]
NONFINITE_KEY = "nonfinite"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Returns ``row`` as one line of valid JSON, newline included.

    Numpy and torch scalars become numbers.

    Raises:
        DataFormatError: A value has no JSON form; names its key.
    """
    lost: dict[str, str] = {}
    plain = {str(key): _plain(value, str(key), lost) for key, value in row.items()}
    if lost:
        plain[NONFINITE_KEY] = lost
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    # A lone surrogate cannot be UTF-8, but its backslash form is exactly the JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def json_text_of(value: Mapping[str, Any] | list[Mapping[str, Any]]) -> str:
    """Returns JSON text; NaN and infinity as in :func:`encode_row`."""
    try:
        # Much faster than the conversion, which few values need.
        text = _encode(value)
        text.encode()  # raises for a lone surrogate, which the conversion escapes
        return text
    except (TypeError, ValueError):
        if isinstance(value, list):
            return f"[{','.join(map(json_text_of, value))}]"
        return encode_row(json_value(value)).decode().rstrip()


def json_value(value: Any) -> Any:
    """Returns a value that JSON can hold; what has no JSON form becomes text, never an error."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    tolist = getattr(value, "tolist", None)  # arrays and scalars of numpy and torch
    try:
        return tolist() if callable(tolist) else str(value)
    except (RuntimeError, TypeError, ValueError):
        return str(value)


def append_row(path: str | os.PathLike[str], row: Mapping[str, Any], durable: bool = False) -> None:
    """Appends one row by one write.

    Args:
        path: The file; created if it is missing (its folder is not).
        row: Names and values.
        durable: Wait until the row is on the disk, so that it survives a power cut; surviving
            ``kill -9`` needs no wait.

    Raises:
        TrainingError: The row could not be written whole (disk full, read-only, folder gone).
            Earlier rows are intact and no part of this one remains.
        DataFormatError: A value has no JSON form.
    """
    line = encode_row(row)
    try:
        # O_APPEND: each write goes to the end, even if another program has appended meanwhile.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        _append_whole(descriptor, line, durable)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        os.close(descriptor)


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Returns all rows; a missing file has none, and a torn last line is dropped.

    Raises:
        DataFormatError: A line other than a torn last one is no JSON object; names file and line.
    """
    try:
        content = _read(Path(path))
    except FileNotFoundError:
        return []
    return [row for _, row in parse_lines(content, os.fspath(path))]


def ends_incomplete(path: str | os.PathLike[str]) -> bool:
    """Returns whether the last line of a file, if any, has no newline and is no JSON object."""
    try:
        return _ends_torn(_read(Path(path)))
    except FileNotFoundError:
        return False


def trim_rows(
    path: str | os.PathLike[str], keep: Callable[[Row], bool], copy_to: str | None = None
) -> int:
    """Drops the rows for which ``keep`` is false, and a torn last line.

    Args:
        path: The file; may be missing.
        keep: Called on each row.
        copy_to: Copy of the whole file, made if anything is dropped. An existing copy is not
            overwritten: ``_1``, ``_2``, … is appended to the name.

    Returns:
        The number of rows dropped (the torn line counts as one).
    """
    source = Path(path)
    if not source.exists():
        return 0
    content = _read(source)
    kept, dropped = select_rows(content, keep, str(source))
    # Nothing to drop, so the file is not rewritten and needs no copy.
    if not dropped:
        return 0
    try:
        if copy_to is not None:
            # Copied before the file is replaced: a crash between the two loses nothing.
            shutil.copyfile(source, free_name(Path(copy_to)))
        write_atomically(source, kept)
    except OSError as error:
        raise _cannot_write(source, error) from error
    return dropped


def select_rows(content: bytes, keep: Callable[[Row], bool], name: str) -> tuple[bytes, int]:
    """Returns the lines for which ``keep`` is true, and how many others there are.

    A torn last line is dropped, and counts as one. ``name`` is for errors, as in
    :func:`parse_lines`.
    """
    lines = parse_lines(content, name)
    # The bytes of the kept lines, so that trimming changes nothing else in the file.
    kept = [line + b"\n" for line, row in lines if keep(row)]
    return b"".join(kept), len(lines) - len(kept) + _ends_torn(content)


def free_name(path: Path) -> Path:
    """Returns ``path``, or if it exists the first free one of ``path_1``, ``path_2``, …"""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}_{number}")
    return candidate


def _read(path: Path) -> bytes:
    # A device such as /dev/full has no end, and a pipe none until its writer is done.
    if path.exists() and not path.is_file():
        raise DataFormatError(
            f"{path}: got a folder, device or pipe, expected a regular file; remove it, or give "
            "the run another log_path=…"
        )
    return path.read_bytes()


def _plain(value: Any, where: str, lost: dict[str, str]) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    # float() also converts numpy's float64, which is a subclass of float.
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        lost[where] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}/{key}", lost) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}/{index}", lost) for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _plain(value.tolist(), where, lost)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise DataFormatError(
        f"{where}: got {type(value).__name__}, expected a number, a string, or lists and dicts of "
        f"them; convert it before logging"
    )


def parse_lines(content: bytes, name: str, first: int = 1) -> list[tuple[bytes, Row]]:
    """Returns each line with its row, without blank lines and a torn last line.

    Args:
        content: A file, or a part of it that begins at a line.
        name: Name of the file, for errors.
        first: Number of the first line of ``content``.

    Raises:
        DataFormatError: A line other than a torn last one is no JSON object; names file and line.
    """
    *lines, tail = content.split(b"\n")
    parsed = []
    for number, line in enumerate(lines, start=first):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # covers UnicodeDecodeError
            raise DataFormatError(
                f"{name}:{number}: not JSON ({error}); expected one object per line. An "
                "interrupted write cannot cause this: repair or remove this line"
            ) from error
        if not isinstance(row, dict):
            raise DataFormatError(
                f"{name}:{number}: got {type(row).__name__}, expected a JSON object"
            )
        parsed.append((line, row))
    # A whole row whose newline is missing is kept: an editor may have removed it.
    last = _row_or_none(tail)
    return parsed if last is None else [*parsed, (tail, last)]


def _row_or_none(tail: bytes) -> Row | None:
    try:
        row = json.loads(tail)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _ends_torn(content: bytes) -> bool:
    tail = content.rpartition(b"\n")[2]
    return bool(tail) and _row_or_none(tail) is None


def _append_whole(descriptor: int, line: bytes, durable: bool) -> None:
    # First end or cut a last line that has no newline, so that the row starts on its own line.
    length = os.fstat(descriptor).st_size
    if length and os.pread(descriptor, 1, length - 1) != b"\n":
        # The whole file, but only in this rare case: the row may be longer than any block.
        content = os.pread(descriptor, length, 0)
        if _ends_torn(content):
            length = content.rfind(b"\n") + 1
            os.ftruncate(descriptor, length)
        else:  # an editor left the newline out
            length += os.write(descriptor, b"\n")
    try:
        # One write, so that a killed process leaves the row whole or a torn last line.
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes fitted")
        if durable:
            os.fsync(descriptor)
    except OSError:
        # A device or pipe cannot be cut, and a file on a dying disk keeps a torn line: readers
        # drop it.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, length)
        raise


def _cannot_write(path: str | os.PathLike[str], error: OSError) -> TrainingError:
    return TrainingError(
        f"{os.fspath(path)} cannot be written: {error.strerror or error}; the rows before are "
        f"intact. Free space or make the folder writable, then continue the run with "
        f"behavior_if_log_dir_exists=resume"
    )
