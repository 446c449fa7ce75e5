"""Comparisons: two answers to one conversation, and which of them is preferred."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from tinker_cookbook.exceptions import DataFormatError, nearest
from tinker_cookbook.renderers import Message, get_text_content

Label: TypeAlias = Literal["A", "B", "Tie"]
"""The preferred completion, or a tie."""

LABELS: tuple[Label, ...] = ("A", "B", "Tie")

SWAPPED: dict[Label, Label] = {"A": "B", "B": "A", "Tie": "Tie"}


@dataclass
class Comparison:
    """Two answers to the same conversation.

    Attributes:
        prompt_conversation: The messages that both answer.
        completion_A: The first answer: one assistant message, or several with what came between.
        completion_B: The second one.
    """

    prompt_conversation: list[Message]
    completion_A: list[Message]
    completion_B: list[Message]

    def swap(self) -> Comparison:
        """Returns the comparison with A and B exchanged."""
        return replace(self, completion_A=self.completion_B, completion_B=self.completion_A)

    def completion(self, label: Literal["A", "B"]) -> list[Message]:
        """Returns the answer that ``label`` names."""
        return self.completion_A if label == "A" else self.completion_B


@dataclass
class LabeledComparison:
    """Comparison with its label.

    Attributes:
        comparison: The two answers.
        label: The better one; ``"Tie"`` where neither is.

    Raises:
        DataFormatError: Another label.
    """

    comparison: Comparison
    label: Label

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise DataFormatError(
                f"label: got {self.label!r}, expected A, B or Tie{nearest(str(self.label), LABELS)}"
            )

    def swap(self) -> LabeledComparison:
        """Returns the same preference with A and B exchanged."""
        return LabeledComparison(self.comparison.swap(), SWAPPED[self.label])

    def chosen_and_rejected(self) -> tuple[list[Message], list[Message]]:
        """Returns the preferred completion and the other one; of a tie, A and B."""
        first = self.comparison if self.label != "B" else self.comparison.swap()
        return first.completion_A, first.completion_B


def is_empty(completion: list[Message]) -> bool:
    """Returns whether no assistant message of ``completion`` has text or calls a tool."""
    return not any(
        get_text_content(message).strip() or message.get("tool_calls")
        for message in completion
        if message["role"] == "assistant"
    )
