"""Rows from local files: JSON lines, JSON arrays, CSV, TSV, parquet."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from tinker_cookbook.exceptions import DataFormatError, DataValidationError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")
_NO_FILE = f"no file that ends in {', '.join(SUFFIXES)}"


def json_lines(file: Path, expected: str = "one JSON object per line") -> Iterator[tuple[str, Any]]:
    """Yields ``FILE:LINE`` and the value of each line that is not blank, also of gzipped files.

    Raises DataFormatError for a line that is not JSON or not UTF-8, and DataValidationError for a
    file that is missing or cannot be read; ``expected`` completes their messages.
    """
    number = 0
    try:
        opened = gzip.open(file) if file.suffix == ".gz" else open(file, "rb")  # noqa: SIM115
        with opened as stream:
            # Read bytes, because a text stream also splits lines at characters that JSON allows in
            # strings, and does not report the line of an encoding error.
            for number, raw in enumerate(cast(BinaryIO, stream), start=1):
                # The file may start with a byte-order mark.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield f"{file}:{number}", json.loads(line)
    except json.JSONDecodeError as error:
        hint = "; the file looks like one JSON array: write one object per line instead"
        raise DataFormatError(
            f"{file}:{number}: not JSON ({error.msg} at column {error.colno}); expected {expected}"
            f"{hint if error.doc.lstrip().startswith('[') else ''}"
        ) from error
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
    # EOFError: a truncated gzip file.
    except (OSError, EOFError) as error:
        raise DataValidationError(f"{file}: the file cannot be read: {error}") from error


def file_rows(file: Path, expected: str = "one JSON object per line") -> Iterator[tuple[str, Any]]:
    """Yields the location (``FILE:LINE`` or ``FILE, row N``) and the value of each row of a file.

    Reads JSON lines (also gzipped), a JSON array, CSV, TSV and parquet, by its suffix or else its
    content. Raises DataFormatError for other content, and DataValidationError for a file
    that is missing or cannot be read.
    """
    kind = _format_of(file)
    if kind == "lines":
        yield from json_lines(file, expected)
    elif kind == "csv":
        yield from _csv_rows(file)
    else:
        rows = _json_array(file) if kind == "json" else _parquet_stream(file)
        for i, row in enumerate(rows):
            yield f"{file}, row {i}", row


def _format_of(file: Path) -> str:
    """Returns ``lines``, ``json``, ``csv`` or ``parquet``."""
    if file.suffix in (".csv", ".tsv"):
        return "csv"
    # The reader of lines reports a missing file.
    if file.suffix == ".parquet" or not file.is_file():
        return "parquet" if file.suffix == ".parquet" else "lines"
    if file.suffix == ".gz":
        return "lines"
    with open(file, "rb") as stream:
        # The beginning of the file is enough to recognise its format.
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"PAR1"):
        return "parquet"
    return "json" if head.startswith(b"[") or file.suffix == ".json" else "lines"


def _csv_rows(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    # A long answer may exceed the default limit of 128 KiB.
    csv.field_size_limit(1 << 30)
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, delimiter="\t" if file.suffix == ".tsv" else ",")
            for row in reader:
                where = f"{file}:{reader.line_num}"
                # DictReader stores surplus cells under the key None, and None for missing cells.
                if None in row or None in row.values():
                    raise DataFormatError(
                        f"{where}: got another number of cells than the header has "
                        f"({', '.join(reader.fieldnames or ())}); expected one for each column, "
                        "with quotes around text that contains the separator"
                    )
                yield where, row
    except FileNotFoundError as error:
        raise DataValidationError(
            f"{file}: there is no such file (searched from {Path.cwd()})"
        ) from error
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{file}: not UTF-8 ({error}); save the file as UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataFormatError(f"{file}: not readable as CSV: {error}") from error


def load_local_rows(path: Path, split: str) -> Sequence[Any]:
    """Returns the rows of a file, or of a folder's files with names that start with ``split``.

    A file has no splits: ``split`` must then be "train".
    """
    files = local_files(path, split)
    # Only parquet files share columns; other rows are kept unchanged.
    if all(file.suffix == ".parquet" for file in files):
        return _parquet_rows(files)
    return [row for file in files for _, row in file_rows(file)]


def local_splits(folder: Path) -> dict[str, list[Path]]:
    """Returns the files of a folder and its subfolders by split.

    ``train.jsonl`` and ``data/train-00000-of-00001.parquet`` (a copy of a Hub repository) both
    belong to the split ``train``.
    """
    # Sort, so that the order of rows does not depend on the file system.
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES))
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(file.name.split(".")[0].split("-")[0], []).append(file)
    return splits


def local_files(path: Path, split: str) -> list[Path]:
    """Returns the file, or the files of a split of a folder; raises DataValidationError if none."""
    if not path.is_file():
        splits = local_splits(path)
        if split not in splits:
            raise DataValidationError(
                f"split: got {split!r}, but {path} has "
                + (f"only {', '.join(sorted(splits))}" if splits else _NO_FILE)
                + f"; expected a file such as {split}.jsonl or {split}-00000-of-00001.parquet"
            )
        return splits[split]
    if split != "train":
        raise DataValidationError(
            f"split: got {split!r}, but {path} is a single file without splits; expected "
            "'train', or a folder with one file per split"
        )
    if not path.name.endswith(SUFFIXES):
        raise DataValidationError(
            f"{path}: the file ends in {path.suffix!r}, expected {', '.join(SUFFIXES)}"
        )
    return [path]


def _json_array(file: Path) -> list[Any]:
    try:
        rows = json.loads(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except json.JSONDecodeError as error:
        # Some tools use the suffix .json for files with one object per line.
        if error.msg == "Extra data":
            return [row for _, row in json_lines(file)]
        raise DataFormatError(
            f"{file}: not JSON ({error}); expected an array of objects, or one "
            "object per line in a file *.jsonl"
        ) from error
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{file}: not UTF-8 ({error}); save the file as UTF-8") from error
    if not isinstance(rows, list):
        raise DataFormatError(
            f"{file}: got a JSON {type(rows).__name__}, expected an array of objects"
        )
    return rows


def _parquet_stream(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows, with one batch at a time in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataFormatError(f"{file}: not readable as parquet: {error}") from error


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
    # Read rows on demand from the columns, without a second copy in the user's cache.
    return cast("Sequence[Any]", datasets.Dataset(pa.concat_tables(tables)))
