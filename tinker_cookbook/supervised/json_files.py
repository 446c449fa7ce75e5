"""Rows from local files (JSON lines, JSON arrays, parquet), and errors for other formats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, nearest

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_NO_FILE = f"no file that ends in {', '.join(SUFFIXES)}"


def json_lines(file: Path, expected: str = "one JSON object a line") -> Iterator[tuple[str, Any]]:
    """Yields ``FILE:LINE`` and the value of each line that is not blank, also of gzipped files.

    Raises DataFormatError for a line that is not JSON or not UTF-8, and DataValidationError for a
    file that is missing or cannot be read; ``expected`` completes their messages.
    """
    number = 0
    try:
        opened = gzip.open(file) if file.suffix == ".gz" else open(file, "rb")  # noqa: SIM115
        with opened as stream:
            # Bytes, because a text stream also ends lines at characters that JSON allows in
            # strings, and does not report on which line its encoding is wrong.
            for number, raw in enumerate(cast(BinaryIO, stream), start=1):
                # A byte-order mark may begin the file.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield f"{file}:{number}", json.loads(line)
    except json.JSONDecodeError as error:
        hint = "; the file looks like one JSON array: write one object a line instead"
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
    # EOFError: a gzip file that was cut off.
    except (OSError, EOFError) as error:
        raise DataValidationError(f"{file}: the file cannot be read: {error}") from error


def load_local_rows(path: Path, split: str) -> Sequence[Any]:
    """Returns the rows of a file, or of a folder's files whose names begin with ``split``.

    A folder is searched with its subfolders, so that a copy of a Hub repository works
    (``data/train-00000-of-00001.parquet``). A file has no splits: ``split`` must then be "train".
    """
    chosen = [path]
    if not path.is_file():
        # Sorted, so that the order of rows does not depend on the file system.
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES))
        # "train.jsonl" and "train-00000-of-00001.parquet" both belong to the split "train".
        splits = [file.name.split(".")[0].split("-")[0] for file in files]
        chosen = [file for file, name in zip(files, splits, strict=True) if name == split]
        if not chosen:
            raise DataValidationError(
                f"split: got {split!r}, but {path} has "
                + (f"only {', '.join(sorted(set(splits)))}" if splits else _NO_FILE)
                + f"; expected a file such as {split}.jsonl or {split}-00000-of-00001.parquet"
            )
    elif split != "train":
        raise DataValidationError(
            f"split: got {split!r}, but {path} is a single file without splits; expected "
            "'train', or a folder with one file a split"
        )
    # Only parquet files share columns; other rows are kept as they are.
    if all(file.suffix == ".parquet" for file in chosen):
        return _parquet_rows(chosen)
    rows: list[Any] = []
    for file in chosen:
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


def _converted(new: Path | str, expression: str, rows: str) -> str:
    """Returns a command that writes ``expression`` for each row ``r`` of ``rows`` as JSON lines."""
    program = f'open("{new}", "w").writelines(json.dumps({expression}) + "\\n" for r in {rows})'
    imports = "csv, json" if rows.startswith("csv.") else "json"
    return f"  python -c 'import {imports}; {program}'"


_QUESTION_AND_ANSWER = (
    '{{"messages": [{{"role": "user", "content": r["{}"]}}, '
    '{{"role": "assistant", "content": r["{}"]}}]}}'
)
# Keys of a row, name of the format, and a Python expression that converts a row ``r``.
_ROWS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("conversations",),
        "ShareGPT's",
        '{"messages": [{"role": {"human": "user", "gpt": "assistant"}.get(t["from"], t["from"]), '
        '"content": t["value"]} for t in r["conversations"]]}',
    ),
    (
        ("prompt", "completion"),
        "that of prompts and completions",
        _QUESTION_AND_ANSWER.format("prompt", "completion"),
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

    A file that does not exist passes; a URL raises DataValidationError.
    """
    text = str(path)
    # Otherwise the URL would be reported as a file that does not exist.
    if "://" in text:
        raise DataValidationError(
            f"got {text}, which is a URL; expected a local file: download it first "
            "(curl -LO …) and give its path"
        )
    file = Path(text).expanduser()
    # json_lines reports a missing file.
    if not file.is_file():
        return
    with open(file, "rb") as stream:
        # The beginning is enough to recognise a format, however large the file is.
        head = stream.read(4096)
    new = file.with_suffix(".jsonl")
    if head.startswith(b"PAR1") or file.suffix == ".parquet":
        name = "a parquet file"
        program = f'datasets.Dataset.from_parquet("{file}").to_json("{new}")'
        command = f"  python -c 'import datasets; {program}'"
    elif file.suffix in (".csv", ".tsv"):
        name = f"a {file.suffix[1:].upper()} file"
        tab = ', delimiter="\\t"' if file.suffix == ".tsv" else ""
        row = _QUESTION_AND_ANSWER.format("COLUMN OF THE QUESTION", "COLUMN OF THE ANSWER")
        command = _converted(new, row, f'csv.DictReader(open("{file}"{tab}))')
    elif head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        name = "a JSON list"
        # The list may be named *.jsonl already; its conversion must not overwrite it.
        new = new if new != file else file.with_suffix(".lines.jsonl")
        command = _converted(new, "r", f'json.load(open("{file}"))')
    else:
        return
    raise DataFormatError(
        f"{file}: got {name}, expected JSON lines (one object a line); convert it:\n{command}"
    )


def wrong_keys(row: Mapping[str, Any], expected: str, where: str) -> str:
    """Returns the error text for a row at FILE:LINE, for known formats with a conversion."""
    text = (
        f"got the keys {', '.join(map(repr, row)) or 'none'}, expected 'messages'"
        f"{nearest('messages', row)} as in {expected}"
    )
    file = where.rpartition(":")[0]
    for keys, name, expression in _ROWS:
        if all(key in row for key in keys):
            new = f"{Path(file).name.split('.')[0]}.messages.jsonl"
            command = _converted(new, expression, f'map(json.loads, open("{file}"))')
            return f"{text}; the format is {name}; convert it:\n{command}"
    return text
