"""Data files in other formats than the one that is read: what they are, and how to convert them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, nearest

_SHAREGPT = (
    '{"messages": [{"role": {"human": "user", "gpt": "assistant"}.get(t["from"], t["from"]), '
    '"content": t["value"]} for t in r["conversations"]]}'
)
# Keys of a row: the format's name, and a Python expression that makes our row of the row ``r``.
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
    """Refuses an address of the web and files of other formats, with the way to convert them.

    A file that is not there passes: reading it gives the error.

    Raises:
        DataValidationError: An address.
        DataFormatError: A file of another format.
    """
    text = str(path)
    if "://" in text:
        raise DataValidationError(
            f"got {text}, which is an address; expected a file on this machine: download it first "
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
    """What format a row without ``messages`` is in and how to convert the file, if it is known."""
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
    """What is wrong with a row that has no ``messages``; ``where`` is ``FILE:LINE``."""
    keys = ", ".join(map(repr, row)) or "none"
    said = f"got the keys {keys}, expected 'messages'{nearest('messages', row)} as in {expected}"
    known = other_row_format(row, where.rpartition(":")[0])
    return said if known is None else f"{said}; {known}"


def _format_of(file: Path) -> tuple[str, str] | None:
    """The name of the format and a program that converts the file, where it is another one."""
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
