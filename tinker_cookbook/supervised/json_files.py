"""Rows from local files (JSON lines, JSON arrays, parquet), and errors for other formats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, nearest

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")


def json_lines(file: Path, expected: str = "one JSON object a line") -> Iterator[tuple[str, Any]]:
    """Yields ``FILE:LINE`` and the value of each line that is not blank, also of gzipped files.

    ``expected`` completes the error messages.

    Raises:
        DataFormatError: A line is not JSON or not UTF-8.
        DataValidationError: The file is missing or cannot be read.
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
                # A byte-order mark may begin the file.
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
    """Returns the rows of a file, or of a folder's files whose names begin with ``split``.

    A folder is searched with its subfolders, so that a copy of a Hub repository works
    (``data/train-00000-of-00001.parquet``). A file has no splits: ``split`` must then be "train".
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
    # Only parquet files share columns; other rows are kept as they are.
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


_SHAREGPT = (
    '{"messages": [{"role": {"human": "user", "gpt": "assistant"}.get(t["from"], t["from"]), '
    '"content": t["value"]} for t in r["conversations"]]}'
)
# Keys of a row, name of the format, and a Python expression that converts a row ``r``.
_ROWS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("conversations",), "ShareGPT's", _SHAREGPT),
    (
        ("prompt", "completion"),
        "that of prompts and completions",
        '{"messages": [{"role": "user", "content": r["prompt"]}, '
        '{"role": "assistant", "content": r["completion"]}]}',
    ),
    (
        ("instruction", "output"),
        "Alpaca's",
        '{"messages": [{"role": "user", "content": (r["instruction"] + "\\n\\n" + '
        'r.get("input", "")).strip()}, {"role": "assistant", "content": r["output"]}]}',
    ),
)


def check_is_json_lines(path: str | Path) -> None:
    """Raises DataFormatError for a file of another format, with a command that converts it.

    A file that does not exist passes: reading it raises the error. A URL raises
    DataValidationError.
    """
    text = str(path)
    if "://" in text:
        raise DataValidationError(
            f"got {text}, which is a URL; expected a local file: download it first "
            "(curl -LO …) and give its path"
        )
    file = Path(text).expanduser()
    if not file.is_file():
        return
    found = _format_of(file)
    if found is not None:
        name, program = found
        raise DataFormatError(
            f"{file}: got {name}, expected JSON lines (one object a line); convert it:\n"
            f"  python -c '{program}'"
        )


def other_row_format(row: Mapping[str, Any], file: str = "FILE.jsonl") -> str | None:
    """Returns the name of a known row format with a command that converts the file, or None."""
    for keys, name, expression in _ROWS:
        if all(key in row for key in keys):
            new = f"{Path(file).name.split('.')[0]}.messages.jsonl"
            program = (
                f'import json; open("{new}", "w").writelines(json.dumps({expression}) + "\\n" '
                f'for r in map(json.loads, open("{file}")))'
            )
            return f"the format is {name}; convert it:\n  python -c '{program}'"
    return None


def wrong_keys(row: Mapping[str, Any], expected: str, where: str) -> str:
    """Returns the error text for a row without ``messages``; ``where`` is ``FILE:LINE``."""
    keys = ", ".join(map(repr, row)) or "none"
    text = f"got the keys {keys}, expected 'messages'{nearest('messages', row)} as in {expected}"
    known = other_row_format(row, where.rpartition(":")[0])
    return text if known is None else f"{text}; {known}"


def _format_of(file: Path) -> tuple[str, str] | None:
    """Returns the name of another format and a program that converts it; None for JSON lines."""
    with open(file, "rb") as stream:
        head = stream.read(4096)
    new = file.with_suffix(".jsonl")
    if head.startswith(b"PAR1") or file.suffix == ".parquet":
        return (
            "a parquet file",
            f'import datasets; datasets.Dataset.from_parquet("{file}").to_json("{new}")',
        )
    if file.suffix in (".csv", ".tsv"):
        tab = ', delimiter="\\t"' if file.suffix == ".tsv" else ""
        return (
            f"a {file.suffix[1:].upper()} file",
            f'import csv, json; open("{new}", "w").writelines(json.dumps({{"messages": '
            '[{"role": "user", "content": r["COLUMN OF THE QUESTION"]}, {"role": "assistant", '
            '"content": r["COLUMN OF THE ANSWER"]}]}) + "\\n" '
            f'for r in csv.DictReader(open("{file}"{tab})))',
        )
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if begins.startswith(b"["):
        new = new if new != file else file.with_suffix(".lines.jsonl")
        return (
            "a JSON list",
            f'import json; open("{new}", "w").writelines(json.dumps(r) + "\\n" '
            f'for r in json.load(open("{file}")))',
        )
    return None
