"""What the teacher is asked, and which of its answers count.

``language`` is the long prompt (``example_data/language_prompt.txt``): rules for code, numbers and
mixed text, answers of two letters. It needs a model that can follow rules: SmolLM2-135M-Instruct
got 0 of 48 texts right. ``language_by_examples`` shows texts with the names of their languages,
which so small a model can continue; the names become the same two letters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    RendererError,
    nearest,
    nearest_sentence,
)
from tinker_cookbook.recipes.start import example_data
from tinker_cookbook.renderers import Message, normalize_messages
from tinker_cookbook.supervised.json_files import json_lines

logger = logging.getLogger(__name__)

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
    EMPTY = "empty"
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
    """

    messages: Sequence[Message]
    answer_regex: str | None = None
    labels: Mapping[str, str] | None = None

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
        if not text:
            return Reason.EMPTY
        if self.answer_regex is not None:
            match = re.search(self.answer_regex, text)
            if match is None:
                # A truncated answer might have matched later, so the token limit is the reason.
                return Reason.NO_MATCH if ended else Reason.CUT_OFF
            text = (match.group(1 if match.re.groups else 0) or "").strip()
        elif not ended:
            return Reason.CUT_OFF
        if self.labels is None:
            return text or Reason.EMPTY
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
    ),
}


def find_task(name: str | None, prompt_file: str | None = None) -> Task:
    """Returns the task of that name, or one with the prompt of a file.

    A ``.json`` file holds a list of messages, such as worked examples. Any other file is text: a
    user message if it has ``{query}`` in it, else a system message.
    """
    if prompt_file is not None:
        return Task(_read_prompt(Path(prompt_file).expanduser()))
    if name is None or name not in TASKS:
        raise ConfigurationError(
            f"task: got {name!r}, expected one of {', '.join(TASKS)}"
            f"{nearest_sentence(str(name), TASKS)} For your own prompt set teacher_prompt_file=…"
        )
    return TASKS[name]


def _read_prompt(file: Path) -> list[Message]:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataValidationError(
            f"teacher_prompt_file: {file} cannot be read ({error}); expected a UTF-8 text file, or "
            "a .json file with a list of messages"
        ) from error
    if not text:
        raise DataValidationError(f"teacher_prompt_file: {file} is empty, expected instructions")
    if file.suffix != ".json":
        return [Message(role="user" if PLACEHOLDER in text else "system", content=text)]
    try:
        raw: Any = json.loads(text)
        messages = normalize_messages(raw if isinstance(raw, list) else [])
    except (ValueError, RendererError) as error:
        raise DataFormatError(f"teacher_prompt_file: {file}: {error}") from error
    if not messages or not all(isinstance(message["content"], str) for message in messages):
        raise DataFormatError(
            f"teacher_prompt_file: {file}: expected a list of messages with text, such as "
            '[{"role": "system", "content": "…"}, …]'
        )
    return messages


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
        expected = '{"query": "…"}, with "label" where the right answer is known'
        found = [_query(row, where, labels) for where, row in json_lines(file, expected)]
    else:
        try:
            # utf-8-sig drops a byte order mark. Not splitlines(), which also splits at characters
            # inside a text, such as U+2028.
            lines = file.read_text(encoding="utf-8-sig").split("\n")
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
    row = row if isinstance(row, dict) else {}
    text, label, group = row.get("query"), row.get("label"), row.get("group")
    if not isinstance(text, str) or not text.strip():
        raise DataFormatError(
            f"{where}: query: got {text!r}, expected text; the fields are "
            f"{', '.join(map(str, row))}"
        )
    if not isinstance(group, str | None):
        raise DataFormatError(f"{where}: group: got {group!r}, expected text or nothing")
    check_label(label, where, "label", labels)
    return Query(text.strip(), label, group)


def check_label(label: Any, where: str, name: str, labels: Collection[str] | None) -> None:
    """Raises DataFormatError for a label that is no text, or none of ``labels``; None passes."""
    if label is None or (isinstance(label, str) and (labels is None or label in labels)):
        return
    expected = "text" if labels is None else f"one of {', '.join(sorted(labels))}"
    raise DataFormatError(
        f"{where}: {name}: got {label!r}, expected {expected}{nearest(str(label), labels or ())}"
    )
