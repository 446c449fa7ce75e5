"""Which comparisons a judge can read: prompt and both answers must fit into its context."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.preference.comparison import Comparison, LabeledComparison
from tinker_cookbook.preference.comparison_renderer import ComparisonRendererFromChatRenderer
from tinker_cookbook.renderers import Message, Renderer

logger = logging.getLogger(__name__)

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
