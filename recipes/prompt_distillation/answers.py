"""Which of the teacher's answers count, and what the student is to say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tinker_cookbook.exceptions import ConfigurationError


class Reason(StrEnum):
    """Why an answer is dropped."""

    CUT_OFF = "cut off"
    EMPTY = "empty"
    NO_MATCH = "no match"
    UNKNOWN_LABEL = "unknown label"


@dataclass(frozen=True)
class AnswerReader:
    """Takes of an answer what the student learns.

    Attributes:
        pattern: What is searched in the answer; its first group, or without one the whole match,
            is taken. None: the whole answer is.
        labels: What may be taken (capitals aside), and what the student is to say for it; None:
            anything, as it stands.
    """

    pattern: str | None
    labels: Mapping[str, str] | None
    _folded: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ConfigurationError(
                    f"answer_regex: got {self.pattern!r}, which is no regular expression: {error}"
                ) from error
        labels = self.labels or {}
        object.__setattr__(self, "_folded", {k.casefold(): v for k, v in labels.items()})

    def read(self, answer: str, ended: bool) -> str | Reason:
        """What the student is to say, or why the answer is dropped.

        ``ended``: the model ended the answer itself. One that was cut off counts only where the
        pattern finds what it looks for: then the rest does not matter.
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
                return Reason.NO_MATCH if ended else Reason.CUT_OFF
            text = (match.group(1 if match.re.groups else 0) or "").strip()
            if not text:
                return Reason.EMPTY
        if self.labels is None:
            return text
        return self._folded.get(text.casefold(), Reason.UNKNOWN_LABEL)


def parse_labels(text: str) -> dict[str, str]:
    """``positive,negative`` as labels; ``Good=positive`` says ``positive`` for the answer Good.

    Raises:
        ConfigurationError: There is none, or an empty or doubled one.
    """
    labels: dict[str, str] = {}
    for part in text.split(","):
        answer, equals, said = (piece.strip() for piece in part.partition("="))
        said = said if equals else answer
        if not answer or not said or answer.casefold() in {label.casefold() for label in labels}:
            raise ConfigurationError(
                f"labels: got {text!r}, expected different words such as positive,negative, or "
                "Good=positive,Bad=negative for answers that the student is to put otherwise"
            )
        labels[answer] = said
    return labels
