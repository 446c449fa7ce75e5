"""Comparisons that were left out, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final

NO_COMPARISON: Final = "nothing to compare (dialogues that do not part at an answer, say)"
EQUAL: Final = "answers that are the same"
EMPTY: Final = "an empty answer"
TIE: Final = "a tie"
LONG_PROMPT: Final = "a prompt that fills max_length"
EQUAL_WHEN_CUT: Final = "answers that are the same up to max_length"
LONG_COMPARISON: Final = "more than max_length tokens, whose label would be cut off"


class Dropped:
    """Rows that were left out, each once however many epochs meet it, with their reasons."""

    def __init__(self) -> None:
        self._reasons: dict[Hashable, str] = {}

    def add(self, row: Hashable, reason: str) -> None:
        """Remembers that ``row`` was left out."""
        self._reasons.setdefault(row, reason)

    def __len__(self) -> int:
        return len(self._reasons)

    def copy(self) -> Dropped:
        """The same rows, to be added to."""
        other = Dropped()
        other._reasons.update(self._reasons)
        return other

    @property
    def counts(self) -> dict[str, int]:
        """Rows by reason, the commonest reason first."""
        return dict(Counter(self._reasons.values()).most_common())

    def describe(self, noun: str = "comparisons") -> str:
        """One sentence for people, such as "3 pairs left out: 2 with an empty answer, …"."""
        told = ", ".join(f"{count} with {reason}" for reason, count in self.counts.items())
        return f"{len(self)} {noun} left out: {told}" if told else f"no {noun} left out"
