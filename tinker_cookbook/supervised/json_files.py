"""Rows from local files: JSON lines, JSON arrays, CSV, TSV, parquet."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.supervised.arrow_rows import parquet_stream, parquet_table
from tinker_cookbook.supervised.row_images import resolve_paths

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
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
                if line:
                    yield f"{file}:{number}", json.loads(line)
    except json.JSONDecodeError as error:
        hint = "; the file looks like one JSON array: write one object per line instead"
        problem = error.msg.removesuffix(" at")  # of an unterminated string
        raise DataFormatError(
            f"{file}:{number}: not JSON ({problem} at column {error.colno}); expected {expected}"
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
    """Yields the location (``FILE:LINE``, or ``FILE[N]`` with N from 0) and the value of each row.

    Reads JSON lines (also gzipped), a JSON array, CSV, TSV and parquet, by its suffix or else its
    content. Paths of images are relative to the file. Raises DataFormatError for other content, and
    DataValidationError for a file that is missing or cannot be read.
    """
    for where, row in _placed_rows(file, expected):
        resolve_paths(row, file.parent)
        yield where, row


def _placed_rows(file: Path, expected: str) -> Iterator[tuple[str, Any]]:
    kind = _format_of(file)
    if kind == "lines":
        yield from json_lines(file, expected)
    elif kind == "csv":
        yield from _csv_rows(file)
    else:
        rows = _json_array(file) if kind == "json" else parquet_stream(file)
        for i, row in enumerate(rows):
            yield f"{file}[{i}]", row


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
    start = 1
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            separator = "\t" if file.suffix == ".tsv" else ","
            # Without strict, a quote that is never closed takes the following rows into its cell.
            reader = csv.reader(stream, delimiter=separator, strict=True)
            header = next(reader, [])
            _check_header(header, separator, file)
            start = reader.line_num + 1
            for cells in reader:
                where, start = f"{file}:{start}", reader.line_num + 1
                if cells and len(cells) != len(header):
                    raise DataFormatError(
                        f"{where}: got another number of cells than the header has "
                        f"({', '.join(header)}); expected one for each column, "
                        "with quotes around text that contains the separator"
                    )
                if cells:
                    yield where, dict(zip(header, cells, strict=True))
    except FileNotFoundError as error:
        raise DataValidationError(
            f"{file}: there is no such file (searched from {Path.cwd()})"
        ) from error
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{file}: not UTF-8 ({error}); save the file as UTF-8") from error
    except csv.Error as error:
        raise DataFormatError(
            f"{file}:{start}: the row that begins here has a wrong quote ({error}); expected text "
            'with quotes in the form "…", with "" for each quote inside'
        ) from error
    except OSError as error:
        raise DataFormatError(f"{file}: not readable as CSV: {error}") from error


def _check_header(header: list[str], separator: str, file: Path) -> None:
    if len(set(header)) < len(header):
        raise DataFormatError(f"{file}:1: got a column twice in {', '.join(header)}; rename one")
    other = next((mark for mark in ";\t,|" if len(header) == 1 and mark in header[0]), None)
    if other is not None:
        raise DataFormatError(
            f"{file}:1: got one column {header[0]!r}; are the cells separated by {other!r}? "
            f"Expected {separator!r}"
        )


def load_local_rows(path: Path, split: str) -> Sequence[Any]:
    """Returns the rows of a file, or of a folder's files with names that start with ``split``.
    Parquet files are read when a row is requested, without invented nulls.

    A file has no splits: ``split`` must then be "train".
    """
    files = local_files(path, split)
    # Only parquet files share columns; other rows are kept unchanged.
    if all(file.suffix == ".parquet" for file in files):
        return parquet_table(files)
    return [row for file in files for _, row in file_rows(file)]


def local_splits(folder: Path) -> dict[str, list[Path]]:
    """Returns the files of a folder and its subfolders by split.

    ``train.jsonl`` and ``data/train-00000-of-00001.parquet`` (a copy of a Hub repository) both
    belong to the split ``train``.
    """
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise DataValidationError(
            f"{folder}: the folder was written by save_to_disk, whose Arrow files are not read; "
            f"expected parquet files: datasets.load_from_disk({str(folder)!r}) has to_parquet"
        )
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
                f"{path}: the folder has no split {split!r}, "
                + (f"only {', '.join(sorted(splits))}" if splits else f"and {_NO_FILE}")
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
        text = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
        rows = json.loads(text)
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
