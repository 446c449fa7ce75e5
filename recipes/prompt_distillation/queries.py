"""Queries of the teacher, and how the student's target is read from an answer."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    nearest,
)
from tinker_cookbook.supervised.json_files import json_lines


class Reason(StrEnum):
    """Why an answer is dropped."""

    CUT_OFF = "cut off"
    EMPTY = "empty"
    NO_MATCH = "no match"
    UNKNOWN_LABEL = "unknown label"


@dataclass(frozen=True)
class AnswerReader:
    """Extracts the student's target from an answer."""

    pattern: str | None
    """Regex of the target: its first group, or without one the match; None: the whole answer."""
    labels: Mapping[str, str] | None
    """Possible answers (case is ignored), each with its target; None: any answer is its target."""

    def __post_init__(self) -> None:
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ConfigurationError(
                    f"answer_regex: got {self.pattern!r}, not a regular expression: {error}"
                ) from error

    def read(self, answer: str, ended: bool) -> str | Reason:
        """Returns the student's target, or why the answer is dropped.

        ``ended``: the model ended the answer itself. A truncated answer counts only if the pattern
        matches: then the rest does not matter.
        """
        text = answer.strip()
        if not text:
            return Reason.EMPTY
        if self.pattern is None:
            if not ended:
                return Reason.CUT_OFF
        else:
            match = re.search(self.pattern, text)
            if match is None:
                # A truncated answer might have matched later, so the token limit is the reason.
                return Reason.NO_MATCH if ended else Reason.CUT_OFF
            text = (match.group(1 if match.re.groups else 0) or "").strip()
            if not text:
                return Reason.EMPTY
        if self.labels is None:
            return text
        # Case is ignored: "german" is the label German.
        folded = {label.casefold(): target for label, target in self.labels.items()}
        return folded.get(text.casefold(), Reason.UNKNOWN_LABEL)


def parse_labels(text: str) -> dict[str, str]:
    """Parses ``positive,negative``, or ``Good=positive`` for the target positive of Good."""
    labels: dict[str, str] = {}
    for part in text.split(","):
        answer, equals, target = (piece.strip() for piece in part.partition("="))
        target = target if equals else answer
        if not answer or not target or answer.casefold() in {label.casefold() for label in labels}:
            raise ConfigurationError(
                f"labels: got {text!r}, expected different words such as positive,negative, or "
                "Good=positive,Bad=negative for answers with another target"
            )
        labels[answer] = target
    return labels


logger = logging.getLogger(__name__)

_EXPECTED = '{"query": "…"}, with "label" where the right answer is known'


@dataclass(frozen=True)
class Query:
    """A text for the teacher, with its right answer if that is known.

    Queries of one group, such as translations of a sentence, are held out together.
    """

    text: str
    label: str | None = None
    group: str | None = None

    @property
    def id(self) -> str:
        """Names the query by its text, so that others may be added or the order changed."""
        # surrogatepass, because JSON may hold lone surrogates, which plain UTF-8 cannot encode.
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_queries(path: str, labels: Collection[str] | None = None) -> list[Query]:
    """Returns the queries of a ``.jsonl`` file, or of a text file with one a line; each text once.

    Raises ``DataError``, with the line, for a row without text or with a label not in ``labels``.
    """
    file = Path(path).expanduser()
    if ".jsonl" in file.suffixes:
        found = [_query(row, where, labels) for where, row in json_lines(file, _EXPECTED)]
    else:
        try:
            # utf-8-sig drops a byte order mark. Not splitlines(), which also splits at characters
            # inside a text, such as U+2028.
            lines = file.read_text(encoding="utf-8-sig").split("\n")
        except FileNotFoundError as error:
            raise DataValidationError(
                f"input_file: there is no file {file} (searched from {Path.cwd()}); expected one "
                f"query a line, or a .jsonl file of rows {_EXPECTED}"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise DataValidationError(f"input_file: {file} cannot be read: {error}") from error
        found = [Query(line.strip()) for line in lines if line.strip()]
    # Equal texts have one id and one seed, so they would give the same answers. The first is kept.
    unique = {query.id: query for query in reversed(found)}
    queries = [unique[id] for id in dict.fromkeys(query.id for query in found)]
    if not queries:
        raise DataValidationError(f"input_file: {file} has no query; expected one at least")
    if len(queries) < len(found):
        logger.warning("%s: %d queries occur twice", file, len(found) - len(queries))
    return queries


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
