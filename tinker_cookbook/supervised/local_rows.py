"""Rows from local files: JSON lines read one by one, JSON arrays, parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from tinker_cookbook.exceptions import DataFormatError, DataValidationError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")


def json_lines(file: Path, expected: str = "one JSON object a line") -> Iterator[tuple[str, Any]]:
    """``FILE:LINE`` and the value of each line that is not blank; also of gzipped files.

    Raises DataFormatError, with the line, where one is not JSON or not UTF-8, and
    DataValidationError for a file that is missing or cannot be read; ``expected`` completes these.
    """
    for number, line in _lines(file, expected):
        where = f"{file}:{number}"
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            hint = (
                "; the file looks like one JSON array: write one object a line instead"
                if line.lstrip().startswith("[")
                else ""
            )
            raise DataFormatError(
                f"{where}: not JSON ({error.msg} at column {error.colno}); expected {expected}"
                f"{hint}"
            ) from error


def _lines(file: Path, expected: str) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        opened = gzip.open(file) if file.suffix == ".gz" else open(file, "rb")  # noqa: SIM115
        with opened as stream:
            # Bytes, because a text stream also ends lines at characters that JSON allows in
            # strings, and cannot say on which line its encoding is wrong.
            for number, raw in enumerate(cast(BinaryIO, stream), start=1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{file}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line); save "
            "the file as UTF-8"
        ) from error
    except FileNotFoundError as error:
        raise DataValidationError(
            f"{file}: there is no such file (searched from {Path.cwd()}); expected a file of "
            f"{expected}"
        ) from error
    except (OSError, EOFError) as error:
        raise DataValidationError(f"{file}: the file cannot be read: {error}") from error


def load_local_rows(path: Path, split: str) -> Sequence[Any]:
    """The rows of a file, or of a folder's files whose names begin with ``split``.

    A folder is searched with its subfolders, so that a copy of a Hub repository works
    (``data/train-00000-of-00001.parquet``). A file has no splits: ``split`` is then to be "train".
    """
    if path.is_file():
        if split != "train":
            raise DataValidationError(
                f"split: got {split!r}, but {path} is a single file without splits; expected "
                "'train', or a folder with one file a split"
            )
        return _rows([path])
    files = sorted(f for f in path.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES))
    chosen = [file for file in files if _split_of(file) == split]
    if not chosen:
        found = ", ".join(sorted({_split_of(file) for file in files}))
        raise DataValidationError(
            f"split: got {split!r}, but {path} has "
            + (f"only {found}" if found else f"no file that ends in {', '.join(SUFFIXES)}")
            + f"; expected a file such as {split}.jsonl or {split}-00000-of-00001.parquet"
        )
    return _rows(chosen)


def _split_of(file: Path) -> str:
    return file.name.split(".")[0].split("-")[0]


def _rows(files: list[Path]) -> Sequence[Any]:
    if all(file.suffix == ".parquet" for file in files):
        return _parquet_rows(files)
    rows: list[Any] = []
    for file in files:
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            rows += [row for _, row in json_lines(file)]
        elif file.suffix == ".json":
            rows += _json_array(file)
        elif file.suffix == ".parquet":
            rows += _parquet_rows([file])
        else:
            raise DataValidationError(
                f"{file}: the file ends in {file.suffix!r}, expected {', '.join(SUFFIXES)}"
            )
    return rows


def _json_array(file: Path) -> list[Any]:
    try:
        rows = json.loads(file.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataFormatError(
            f"{file}: not JSON ({error}); expected an array of objects; name a file of one object "
            "a line *.jsonl"
        ) from error
    if not isinstance(rows, list):
        raise DataFormatError(
            f"{file}: got a JSON {type(rows).__name__}, expected an array of objects"
        )
    return rows


def _parquet_rows(files: list[Path]) -> Sequence[Any]:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for file in files:
        try:
            tables.append(pq.read_table(file))
        except (pa.ArrowException, OSError) as error:
            raise DataFormatError(f"{file}: not readable as parquet: {error}") from error
    # Rows on demand from the columns, without a second copy of the data in the user's cache.
    return cast("Sequence[Any]", datasets.Dataset(pa.concat_tables(tables)))
