"""Comparisons of two answers to one conversation, and prompts for a model that labels them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from tinker_cookbook.exceptions import (
    DataFormatError,
    DataValidationError,
    RendererError,
    nearest,
)
from tinker_cookbook.judges.labels import LabelRenderer
from tinker_cookbook.renderers import Message, Renderer, ToolSpec, get_text_content
from tinker_cookbook.supervised.conversation_row import data_error, with_tools
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.imports import tinker, torch

logger = logging.getLogger(__name__)

Label: TypeAlias = Literal["A", "B", "Tie"]
"""The preferred completion, or a tie."""

LABELS: tuple[Label, ...] = ("A", "B", "Tie")

SWAPPED: dict[Label, Label] = {"A": "B", "B": "A", "Tie": "Tie"}

_HEADERS = ("==== Completion A ====", "==== Completion B ====", "==== Preference ====")


@dataclass
class Comparison:
    """Two answers to a conversation; each has one or more assistant messages."""

    prompt_conversation: list[Message]
    completion_A: list[Message]
    completion_B: list[Message]
    tools: list[ToolSpec] = field(default_factory=list)
    """Tools that the answers may call; ``prompt`` declares them."""

    def prompt(self, renderer: Renderer) -> list[Message]:
        """Returns the conversation with the tools declared in the chat format; raises RendererError
        if the format has no tools."""
        return with_tools(self.prompt_conversation, self.tools, renderer)

    def swap(self) -> Comparison:
        """Returns the comparison with A and B exchanged."""
        return replace(self, completion_A=self.completion_B, completion_B=self.completion_A)


@dataclass
class LabeledComparison:
    """Comparison with its label; raises ``DataFormatError`` for a label other than A, B or Tie."""

    comparison: Comparison
    label: Label
    place: str = field(default="", compare=False, repr=False)
    """Place of its row, such as ``FILE:LINE``, for messages."""

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise DataFormatError(
                f"label: got {self.label!r}, expected 'A', 'B' or 'Tie'"
                f"{nearest(str(self.label), LABELS)}"
            )

    def swap(self) -> LabeledComparison:
        """Returns the same preference with A and B exchanged."""
        return LabeledComparison(self.comparison.swap(), SWAPPED[self.label], self.place)

    def chosen_and_rejected(self) -> tuple[list[Message], list[Message]]:
        """Returns the preferred completion and the other one; for a tie, A and B."""
        first = self.comparison if self.label != "B" else self.comparison.swap()
        return first.completion_A, first.completion_B


def is_empty(completion: list[Message]) -> bool:
    """Returns whether no assistant message of ``completion`` has text or calls a tool.

    An image counts as content, for the renderer to refuse.
    """
    return not has_images(completion) and not any(
        get_text_content(message).strip() or message.get("tool_calls")
        for message in completion
        if message["role"] == "assistant"
    )


_TRIAL = Comparison(
    prompt_conversation=[{"role": "user", "content": "Hi"}],
    completion_A=[{"role": "assistant", "content": "Hello."}],
    completion_B=[{"role": "assistant", "content": "Good day."}],
)


class ComparisonRenderer(ABC):
    """Renders comparisons as prompts; the next token is the label."""

    @abstractmethod
    def build_generation_prompt(self, comparison: Comparison) -> tinker.ModelInput:
        """Renders the prompt after which a label is sampled."""

    @abstractmethod
    def to_model_input_weights(
        self, labeled_comparison: LabeledComparison
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """Returns T tokens of prompt and label, and weights [T] that are 0 on the prompt."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the prompts."""


class ComparisonRendererFromChatRenderer(ComparisonRenderer):
    """Renders comparisons in a chat format: conversation, then each completion after a header.

    Headers are system messages. For formats without system messages inside a conversation, all
    text is put into one user message.

    ``LabelRenderer`` explains which token represents a label, and where examples end.
    """

    def __init__(self, convo_renderer: Renderer) -> None:
        self.convo_renderer = convo_renderer

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the chat renderer."""
        return self.convo_renderer.tokenizer

    def build_generation_prompt(self, comparison: Comparison) -> tinker.ModelInput:
        """Renders the chat format's generation prompt of ``comparison_to_convo``."""
        return self.convo_renderer.build_generation_prompt(self.comparison_to_convo(comparison))

    def build_label_prompt(self, comparison: Comparison) -> tinker.ModelInput:
        """Renders all tokens before the distinguishing token, as in training."""
        return self._labels.prompt(self.comparison_to_convo(comparison))

    def to_model_input_weights(
        self, labeled_comparison: LabeledComparison
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """Renders prompt and label up to the distinguishing token."""
        convo = self.comparison_to_convo(labeled_comparison.comparison)
        tokens, weights = self._labels.example(convo, labeled_comparison.label)
        return tinker.ModelInput.from_ints(tokens), weights

    @property
    def label_tokens(self) -> dict[Label, int]:
        """Distinguishing token of each label."""
        return self._labels.tokens

    def comparison_to_convo(self, comparison: Comparison) -> list[Message]:
        """Returns the messages that a label answers; raises RendererError for images."""
        prompt = comparison.prompt(self.convo_renderer)
        _refuse_images(comparison)
        if self._allows_headers:
            return with_headers(comparison, prompt)
        # One user message with everything except a leading system prompt and declared tools.
        # Formats without system messages inside a conversation would reject the headers.
        own = comparison.prompt_conversation
        begins = bool(own) and own[0]["role"] == "system"
        kept = len(prompt) - len(own) + begins
        texts = [
            *map(_as_text, prompt[kept:]),
            _HEADERS[0],
            *map(_as_text, comparison.completion_A),
            _HEADERS[1],
            *map(_as_text, comparison.completion_B),
            _HEADERS[2],
        ]
        return [*prompt[:kept], Message(role="user", content="\n\n".join(texts))]

    @cached_property
    def _allows_headers(self) -> bool:
        """Whether the chat format renders system messages inside a conversation."""
        try:
            self.convo_renderer.build_generation_prompt(
                with_headers(_TRIAL, _TRIAL.prompt_conversation)
            )
        except RendererError:
            return False
        return True

    @cached_property
    def _labels(self) -> LabelRenderer[Label]:
        trial = self.comparison_to_convo(_TRIAL)
        return LabelRenderer(self.convo_renderer, LABELS, trial)


def _as_text(message: Message) -> str:
    """Returns a message as a line of text; calls as JSON, since they may be all of an answer."""
    calls = [call.function for call in message.get("tool_calls", ())]
    texts = [get_text_content(message), *(f"{call.name}({call.arguments})" for call in calls)]
    return f"{message['role'].capitalize()}: " + "\n".join(filter(None, texts))


def with_headers(comparison: Comparison, prompt: list[Message]) -> list[Message]:
    """Returns ``prompt`` and both answers, with headers as system messages; a label follows."""
    first, second, question = [Message(role="system", content=text) for text in _HEADERS]
    answers = [first, *comparison.completion_A, second, *comparison.completion_B, question]
    return [*prompt, *answers]


def label_of_text(text: str) -> Label | None:
    """Returns the label that starts with a sampled token, or None."""
    token = text.strip()
    if token == "A" or token == "B":
        return token
    return "Tie" if token and "Tie".startswith(token) else None


def _refuse_images(comparison: Comparison) -> None:
    answers = (comparison.completion_A, comparison.completion_B)
    if any(map(has_images, (comparison.prompt_conversation, *answers))):
        raise RendererError(
            "prompt_conversation: got an image, but models that compare answers read text only; "
            "expected text, or direct preference optimization (preference.train_dpo)"
        )


def check_text_only(comparisons: Iterable[LabeledComparison]) -> None:
    """Raises DataFormatError with the place of the first comparison that has an image."""
    for number, labeled in enumerate(comparisons):
        with data_error(labeled.place or f"comparison {number}"):
            _refuse_images(labeled.comparison)


def comparisons_that_fit(
    comparisons: Sequence[LabeledComparison],
    renderer: Renderer,
    max_length: int | None,
    *,
    new_answers: int = 0,
    answer_tokens: int = 0,
) -> list[LabeledComparison]:
    """Returns the comparisons that fit into the judge's context of ``max_length`` tokens.

    ``new_answers`` (0, 1 or 2) of the two answers will be replaced by samples of up to
    ``answer_tokens`` tokens. Logs the number of comparisons that do not fit. Raises
    DataFormatError for one with an image.
    """
    check_text_only(comparisons)
    if max_length is None or not comparisons:
        return list(comparisons)
    build = ComparisonRendererFromChatRenderer(renderer).build_label_prompt
    empty: list[Message] = [{"role": "assistant", "content": ""}]

    def length(comparison: Comparison) -> int:
        if new_answers:
            comparison = replace(comparison, completion_B=empty)
        if new_answers == 2:
            comparison = replace(comparison, completion_A=empty)
        # Plus one token for the label.
        return build(comparison).length + new_answers * answer_tokens + 1

    # With one new answer, the other one may be either answer of the data.
    lengths = [
        max(length(one.comparison), length(one.comparison.swap()))
        if new_answers == 1
        else length(one.comparison)
        for one in comparisons
    ]
    kept = [one for one, size in zip(comparisons, lengths, strict=True) if size <= max_length]
    if not kept:
        raise DataValidationError(
            f"comparisons: all {len(comparisons)} are longer for the judge than max_length="
            f"{max_length} tokens (the shortest has {min(lengths)}), expected at least one that "
            "fits; use shorter prompts or answers (max_tokens), or a model with a longer context"
        )
    if len(kept) < len(comparisons):
        logger.warning(
            "%d of %d comparisons are longer for the judge than %d tokens and were skipped",
            len(comparisons) - len(kept),
            len(comparisons),
            max_length,
        )
    return kept
