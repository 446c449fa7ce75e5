"""Prompts of a reward model: a comparison as a conversation whose next token is the label."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, RendererError
from tinker_cookbook.preference.comparison import LABELS, Comparison, Label, LabeledComparison
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.supervised.common import tokens_of
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
    import torch
else:
    tinker = lazy_module("tinker")

logger = logging.getLogger(__name__)

_MARKS = ("==== Completion A ====", "==== Completion B ====", "==== Preference ====")

_TRIAL = Comparison(
    prompt_conversation=[{"role": "user", "content": "Hi"}],
    completion_A=[{"role": "assistant", "content": "Hello."}],
    completion_B=[{"role": "assistant", "content": "Good day."}],
)


class ComparisonRenderer(ABC):
    """Turns comparisons into prompts whose next token is the label."""

    @abstractmethod
    def build_generation_prompt(self, comparison: Comparison) -> tinker.ModelInput:
        """The prompt after which a label is sampled."""

    @abstractmethod
    def to_model_input_weights(
        self, labeled_comparison: LabeledComparison
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """Prompt and label as T tokens, and their weights [T], which are 0 on the prompt."""

    def to_tokens_weights(
        self, labeled_comparison: LabeledComparison
    ) -> tuple[list[int], list[float]]:
        """``to_model_input_weights`` as plain numbers."""
        model_input, weights = self.to_model_input_weights(labeled_comparison)
        return tokens_of(model_input).tolist(), weights.tolist()

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens."""


class ComparisonRendererFromChatRenderer(ComparisonRenderer):
    """Comparisons in a chat format: the conversation, then each completion behind a mark.

    The marks are system messages. Chat formats that have no system message in the middle of a
    conversation get the whole comparison as the text of one user message instead.

    A label is told from the others by its first token (by the first that differs, where a format
    puts an empty thinking block or a space before all of them): examples end with that token, and
    its probability is the label's. ``Tie`` may have more tokens, which are not trained.
    """

    def __init__(self, convo_renderer: Renderer) -> None:
        self.convo_renderer = convo_renderer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the chat renderer."""
        return self.convo_renderer.tokenizer

    def build_generation_prompt(self, comparison: Comparison) -> tinker.ModelInput:
        """The chat format's own prompt for an answer to ``comparison_to_convo``."""
        return self.convo_renderer.build_generation_prompt(self.comparison_to_convo(comparison))

    def build_label_prompt(self, comparison: Comparison) -> tinker.ModelInput:
        """All tokens before the one that tells the labels apart, as in training.

        It is ``build_generation_prompt`` unless the format writes something between that and
        every answer.
        """
        tokens, _ = self.to_tokens_weights(LabeledComparison(comparison, "A"))
        return tinker.ModelInput.from_ints(tokens[:-1])

    def to_model_input_weights(
        self, labeled_comparison: LabeledComparison
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """Prompt and label, cut behind the token that tells the labels apart.

        Raises:
            DataValidationError: The comparison has images: only text can be compared.
        """
        tokens, weights, first = self._answered(
            self.comparison_to_convo(labeled_comparison.comparison), labeled_comparison.label
        )
        end = first + self._labels[0] + 1
        return tinker.ModelInput.from_ints(tokens[:end]), weights[:end]

    @property
    def label_tokens(self) -> dict[Label, int]:
        """The token that tells each label from the others."""
        return self._labels[1]

    def comparison_to_convo(self, comparison: Comparison) -> list[Message]:
        """The messages that are answered with a label."""
        if self._marks_are_messages:
            return _with_marks(comparison)
        return _as_one_message(comparison)

    @cached_property
    def _marks_are_messages(self) -> bool:
        try:
            self.convo_renderer.build_generation_prompt(_with_marks(_TRIAL))
        except RendererError:
            return False
        return True

    @cached_property
    def _labels(self) -> tuple[int, dict[Label, int]]:
        """How many trained tokens come before the labels differ, and the tokens that do."""
        convo = self.comparison_to_convo(_TRIAL)
        answers: list[list[int]] = []
        for label in LABELS:
            tokens, _, first = self._answered(convo, label)
            answers.append(tokens[first:])
        for offset, at in enumerate(zip(*answers, strict=False)):
            if len(set(at)) == len(LABELS):
                return offset, dict(zip(LABELS, at, strict=True))
            if len(set(at)) > 1:
                break
        raise ConfigurationError(
            f"renderer_name: with {self.convo_renderer.spec!r} and this tokenizer the labels "
            f"{', '.join(LABELS)} begin with the same token in part, expected three different "
            "ones; choose another renderer"
        )

    def _answered(self, convo: list[Message], label: Label) -> tuple[list[int], torch.Tensor, int]:
        """Tokens and weights of ``convo`` with its answer, and where the trained ones begin."""
        answer: Message = {"role": "assistant", "content": label}
        model_input, weights = self.convo_renderer.build_supervised_example([*convo, answer])
        tokens = tokens_of(model_input).tolist()
        return tokens, weights, int(weights.nonzero()[0])


def _with_marks(comparison: Comparison) -> list[Message]:
    def mark(text: str) -> Message:
        return {"role": "system", "content": text}

    first, second, question = _MARKS
    return [
        *comparison.prompt_conversation,
        mark(first),
        *comparison.completion_A,
        mark(second),
        *comparison.completion_B,
        mark(question),
    ]


def _as_one_message(comparison: Comparison) -> list[Message]:
    prompt = comparison.prompt_conversation
    kept = 1 if prompt and prompt[0]["role"] == "system" else 0
    lines = [_line(message) for message in prompt[kept:]]
    for mark, completion in zip(
        _MARKS, (comparison.completion_A, comparison.completion_B, []), strict=True
    ):
        lines += [mark, *map(_line, completion)]
    return [*prompt[:kept], {"role": "user", "content": "\n\n".join(lines)}]


def _line(message: Message) -> str:
    return f"{message['role'].capitalize()}: {get_text_content(message)}"


def label_of_text(text: str) -> Label | None:
    """The label that a sampled token says, or None; the first piece of Tie is enough."""
    said = text.strip()
    if said == "A" or said == "B":
        return said
    return "Tie" if said and "Tie".startswith(said) else None


_EMPTY: list[Message] = [{"role": "assistant", "content": ""}]


def comparisons_that_fit(
    comparisons: Sequence[LabeledComparison],
    renderer: Renderer,
    max_length: int | None,
    *,
    new_answers: int = 0,
    answer_tokens: int = 0,
) -> list[LabeledComparison]:
    """The comparisons that a judge can read; a warning says how many are left out.

    Args:
        comparisons: In any order, which is kept.
        renderer: Chat format of the judge.
        max_length: Most tokens that the judge can read; ``None`` keeps all.
        new_answers: Of the two answers 0, 1 or 2 will be sampled, instead of those in the data.
        answer_tokens: Most tokens of a sampled answer.

    Raises:
        DataValidationError: No comparison fits.
    """
    if max_length is None or not comparisons:
        return list(comparisons)
    build = ComparisonRendererFromChatRenderer(renderer).build_label_prompt

    def length(comparison: Comparison) -> int:
        if new_answers:
            comparison = replace(comparison, completion_B=_EMPTY)
        if new_answers == 2:
            comparison = replace(comparison, completion_A=_EMPTY)
        # One more token is the label.
        return build(comparison).length + new_answers * answer_tokens + 1

    # With one new answer either of the data's may be the other.
    sides = [
        max(length(one.comparison), length(one.comparison.swap()))
        if new_answers == 1
        else length(one.comparison)
        for one in comparisons
    ]
    kept = [one for one, size in zip(comparisons, sides, strict=True) if size <= max_length]
    if not kept:
        raise DataValidationError(
            f"comparisons: all {len(comparisons)} are longer for the judge than max_length="
            f"{max_length} tokens (the shortest has {min(sides)}), expected at least one that "
            "fits; take shorter prompts or answers (max_tokens), or a model with a longer context"
        )
    if len(kept) < len(comparisons):
        logger.warning(
            "%d of %d comparisons are longer for the judge than %d tokens and are left out",
            len(comparisons) - len(kept),
            len(comparisons),
            max_length,
        )
    return kept
