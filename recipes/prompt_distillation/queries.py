"""The texts that the teacher is asked about."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, nearest
from tinker_cookbook.supervised.json_files import json_lines

logger = logging.getLogger(__name__)

_EXPECTED = '{"query": "…"}, with "label" where the right answer is known'


@dataclass(frozen=True)
class Query:
    """A text to ask the teacher about.

    Attributes:
        text: As the student gets it.
        label: The right answer, where it is known.
        group: Queries of one group (translations of a sentence, say) are held out together.
    """

    text: str
    label: str | None = None
    group: str | None = None

    @property
    def id(self) -> str:
        """Names the query by its text, so that others may be added or the order changed."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_queries(path: str, labels: Collection[str] | None = None) -> list[Query]:
    """The queries of a ``.jsonl`` file, or of a text file with one a line; each text once.

    Raises:
        DataError: There is no such file or no query in it; a row has no text, or a label that is
            none of ``labels``. Names the line.
    """
    file = Path(path).expanduser()
    found = _from_rows(file, labels) if ".jsonl" in file.suffixes else _from_lines(file)
    unique = {query.id: query for query in reversed(found)}
    queries = [unique[id] for id in dict.fromkeys(query.id for query in found)]
    if not queries:
        raise DataValidationError(f"input_file: {file} has no query; expected one at least")
    if len(queries) < len(found):
        logger.warning("%s: %d queries stand there twice", file, len(found) - len(queries))
    return queries


def _from_rows(file: Path, labels: Collection[str] | None) -> list[Query]:
    return [_query(row, where, labels) for where, row in json_lines(file, _EXPECTED)]


def _query(row: Any, where: str, labels: Collection[str] | None) -> Query:
    if not isinstance(row, dict):
        raise DataFormatError(f"{where}: got a JSON {type(row).__name__}, expected {_EXPECTED}")
    text, label, group = row.get("query"), row.get("label"), row.get("group")
    if not isinstance(text, str) or not text.strip():
        raise DataFormatError(
            f"{where}: query: got {text!r}, expected text; a row is {_EXPECTED}, got the fields "
            f"{', '.join(map(str, row)) or 'none'}"
        )
    for name, value in (("label", label), ("group", group)):
        if value is not None and not isinstance(value, str):
            raise DataFormatError(f"{where}: {name}: got {value!r}, expected text or nothing")
    if label is not None and labels is not None and label not in labels:
        raise DataFormatError(
            f"{where}: label: got {label!r}, expected one of {', '.join(sorted(labels))}"
            f"{nearest(label, labels)}"
        )
    return Query(text.strip(), label, group)


def _from_lines(file: Path) -> list[Query]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise DataValidationError(
            f"input_file: there is no file {file} (searched from {Path.cwd()}); expected one query "
            f"a line, or a .jsonl file of rows {_EXPECTED}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataValidationError(f"input_file: {file} cannot be read: {error}") from error
    return [Query(line.strip()) for line in lines if line.strip()]
