"""What the teacher is asked, and which of its answers count.

``language`` is the long prompt (``example_data/language_prompt.txt``): rules for code, numbers and
mixed text, answers of two letters. It needs a model that can follow rules: SmolLM2-135M-Instruct
got 0 of 48 texts right. ``language_by_examples`` shows texts with the names of their languages,
which so small a model can continue; the names become the same two letters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError, DataValidationError, nearest
from tinker_cookbook.recipes.start import example_data, read_text
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.json_files import json_lines

PLACEHOLDER = "{query}"
LANGUAGE_NAMES = {
    "ar": "Arabic", "de": "German", "el": "Greek", "en": "English", "es": "Spanish", "fr": "French",
    "hi": "Hindi", "ru": "Russian", "tr": "Turkish", "ur": "Urdu", "vi": "Vietnamese",
    "zh": "Chinese", "ot": "Other",
}  # fmt: skip
LANGUAGE_CLASSIFICATION_PROMPT = example_data("language_prompt.txt").read_text(encoding="utf-8")
"""The text of the official cookbook (Apache 2.0), for ``str.format``: published runs have it."""
# None of these texts is a query of example_data/languages.jsonl. The order matters to a small
# model, which favours what it saw last: SmolLM2-135M-Instruct got 69% of 110 texts right with this
# one, and 52% to 65% with others.
_EXAMPLES = (
    ("Guten Abend, wie geht es Ihnen?", "de"),
    ("Je ne sais pas où il est.", "fr"),
    ("¿Qué hora es?", "es"),
    ("12345", "ot"),
    ("Bugün hava çok güzel.", "tr"),
    ("Hôm nay trời đẹp.", "vi"),
    ("Сегодня хорошая погода.", "ru"),
    ("Καλημέρα σας.", "el"),
    ("صباح الخير يا صديقي.", "ar"),
    ("آج موسم اچھا ہے۔", "ur"),
    ("आज मौसम अच्छा है।", "hi"),
    ("今天天气很好。", "zh"),
    ("Dove sei?", "ot"),
    ("Nice to meet you.", "en"),
)


class Reason(StrEnum):
    """Why an answer is dropped."""

    CUT_OFF = "cut off"
    NO_MATCH = "no match"
    UNKNOWN_LABEL = "unknown label"


@dataclass(frozen=True)
class Task:
    """A prompt, and the rules that select and translate its answers.

    Attributes:
        messages: The prompt, with ``{query}`` for the query; without it the query follows as a
            user message.
        answer_regex: The part of an answer that counts: its first group, or without one the match;
            None: all of it.
        labels: Possible answers (case is ignored), each with the student's target for it; None: any
            answer is its target.
        max_tokens: Tokens after which an answer is cut.
    """

    messages: Sequence[Message]
    answer_regex: str | None = None
    labels: Mapping[str, str] | None = None
    max_tokens: int = 1000

    def prompt(self, query: str) -> list[Message]:
        """Returns the teacher's prompt for a query."""
        texts = [str(message["content"]) for message in self.messages]
        filled = [
            Message(role=message["role"], content=text.replace(PLACEHOLDER, query))
            for message, text in zip(self.messages, texts, strict=True)
        ]
        if not any(PLACEHOLDER in text for text in texts):
            filled.append(Message(role="user", content=query))
        return filled

    def target(self, answer: str, ended: bool) -> str | Reason:
        """Returns the student's target, or why the answer is dropped.

        ``ended``: the model ended the answer itself. A truncated answer counts only if the regex
        matches: then the rest does not matter.
        """
        text = answer.strip()
        if self.answer_regex is not None:
            match = re.search(self.answer_regex, text)
            if match is None:
                # A truncated answer might have matched later, so the token limit is the reason.
                return Reason.NO_MATCH if ended else Reason.CUT_OFF
            text = (match.group(1 if match.re.groups else 0) or "").strip()
        elif not text or not ended:
            return Reason.NO_MATCH if ended else Reason.CUT_OFF
        if self.labels is None:
            return text
        folded = {label.casefold(): target for label, target in self.labels.items()}
        return folded.get(text.casefold(), Reason.UNKNOWN_LABEL)


TASKS: Mapping[str, Task] = {
    "language": Task(
        [Message(role="user", content=LANGUAGE_CLASSIFICATION_PROMPT.format(text=PLACEHOLDER))],
        # Searched in the whole answer, because a model may write other text first.
        r"(?i)\banswer:\s*([a-z]{2})\b",
        {code: code for code in LANGUAGE_NAMES},
    ),
    "language_by_examples": Task(
        [
            message
            for text, code in _EXAMPLES
            for message in (
                Message(role="user", content=text),
                Message(role="assistant", content=LANGUAGE_NAMES[code]),
            )
        ],
        # The first word only: what a small model writes after it is ignored.
        r"^\s*([A-Za-z]+)\b",
        {name: code for code, name in LANGUAGE_NAMES.items()},
        max_tokens=5,
    ),
}


def prompt_of_file(path: str) -> Task:
    """Returns a task with the prompt of a text file: a user message if it has ``{query}`` in it,
    else a system message."""
    text = read_text(path, "teacher_prompt_file").strip()
    return Task([Message(role="user" if PLACEHOLDER in text else "system", content=text)])


def parse_labels(text: str) -> dict[str, str]:
    """Parses ``positive,negative``, or ``Good=positive`` for the target positive of Good."""
    pairs = (part.partition("=") for part in text.split(","))
    return {answer.strip(): (target or answer).strip() for answer, _, target in pairs}


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
    found: dict[str, Query] = {}
    if path.endswith(".jsonl"):
        expected = '{"query": "…"}, with "label" where the right answer is known'
        for where, row in json_lines(Path(path).expanduser(), expected):
            if not isinstance(row, dict) or not str(row.get("query") or "").strip():
                raise DataFormatError(f"{where}: got {row!r:.80}, expected {expected}")
            check_label(row.get("label"), where, "label", labels)
            query = Query(row["query"].strip(), row.get("label"), row.get("group"))
            found.setdefault(query.id, query)
    else:
        # Not splitlines(), which also splits at characters inside a text, such as U+2028.
        for line in filter(None, map(str.strip, read_text(path, "input_file").split("\n"))):
            found.setdefault(Query(line).id, Query(line))
    if not found:
        raise DataValidationError(f"input_file: {path} has no query; expected one at least")
    return list(found.values())


def check_label(label: Any, where: str, name: str, labels: Collection[str] | None) -> None:
    """Raises DataFormatError for a label that is none of ``labels``; None passes."""
    if label is not None and labels is not None and label not in labels:
        raise DataFormatError(
            f"{where}: {name}: got {label!r}, expected one of {', '.join(sorted(labels))}"
            f"{nearest(str(label), labels)}"
        )
