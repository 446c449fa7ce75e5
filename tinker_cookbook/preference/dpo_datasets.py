"""Datasets for DPO: comparisons as pairs of datums, alternating chosen and rejected."""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias, get_args

import chz
import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference.comparison import LabeledComparison
from tinker_cookbook.preference.preference_datasets import (
    ComparisonDataset,
    ComparisonDatasetBuilder,
    ComparisonSet,
    Dropped,
    SkipReason,
)
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.common import (
    check_images_fit,
    count_loss_tokens,
    datum_from_model_input_weights,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.imports import tinker

logger = logging.getLogger(__name__)

Ties: TypeAlias = Literal["drop", "half"]
"""Treatment of ties: drop them, or train both orders with half the weight, which keeps the
rewards of the two answers close."""


class PairDataset(ComparisonDataset):
    """Batches of pairs: ``[chosen_0, rejected_0, chosen_1, rejected_1, …]``.

    A batch of N comparisons is 2N datums. Weights are 1 on the tokens of each answer's assistant
    messages and 0 on the prompt: the loss uses the log-probability of whole answers, without a mean
    over tokens. A tie becomes two pairs with weight 0.5 in the same batch, (A, B) and (B, A), so
    that the weights of a batch's pairs sum to N. ``max_length`` truncates answers; a comparison
    with a prompt that fills it is skipped.
    """

    def __init__(
        self,
        comparisons: ComparisonSet,
        batch_size: int,
        renderer: Renderer,
        max_length: int | None = None,
    ) -> None:
        self._renderer, self._max_length = renderer, max_length
        self._cut: set[int] = set()
        super().__init__(comparisons, batch_size, self._to_data)

    @property
    def num_cut(self) -> int:
        """Number of comparisons so far with an answer truncated at ``max_length``."""
        return len(self._cut)

    def report(self) -> list[str]:
        """Returns lines about comparisons skipped or truncated so far."""
        line = f"{self.num_cut} comparisons: an answer was truncated at max_length"
        return [*super().report(), *([line] if self._cut else [])]

    def _to_data(self, labeled: LabeledComparison) -> list[tinker.Datum] | str:
        tie, limit = labeled.label == "Tie", self._max_length
        # Answers of earlier turns are common to both sides of a pair, so do not train on them.
        prompt: list[Message] = [
            {**message, "trainable": False} for message in labeled.comparison.prompt(self._renderer)
        ]
        data: list[tinker.Datum] = []
        cut = False
        for answer in labeled.chosen_and_rejected():
            marked: list[Message] = [
                {**message, "trainable": message["role"] == "assistant"} for message in answer
            ]
            model_input, weights = self._renderer.build_supervised_example(
                [*prompt, *marked], TrainOnWhat.CUSTOMIZED
            )
            check_images_fit(model_input, limit)
            # Train a tie in both directions with half the weight, so that it counts as one pair.
            weights = weights * (0.5 if tie else 1.0)
            datum = datum_from_model_input_weights(model_input, weights, limit)
            # The prompt fills max_length, so no answer token is left.
            if not count_loss_tokens(datum):
                return SkipReason.LONG_PROMPT
            cut = cut or (limit is not None and model_input.length > limit)
            data.append(datum)
        chosen, rejected = (d.loss_fn_inputs["target_tokens"].to_numpy() for d in data)
        # Truncation may have removed the difference.
        if np.array_equal(chosen, rejected):
            return SkipReason.EQUAL_WHEN_CUT
        if cut:
            if not self._cut:
                logger.warning(
                    "max_length=%d truncates an answer; further ones are only counted (num_cut)",
                    limit,
                )
            self._cut.add(id(labeled))
        return [*data, *reversed(data)] if tie else data


def without_ties(comparisons: ComparisonSet, part: str) -> ComparisonSet:
    """Returns the comparisons with a preference; counts ties as dropped."""
    kept = ComparisonSet(dropped=Dropped(comparisons.dropped))
    for i, labeled in enumerate(comparisons.usable):
        if labeled.label == "Tie":
            kept.dropped[("tie", i)] = SkipReason.TIE
        else:
            kept.usable.append(labeled)
    if not kept.usable:
        raise DataValidationError(
            f"{part} data: got only comparisons without a preference, expected at least one with; "
            f"{kept.dropped.describe()}"
        )
    return kept


@chz.chz
class DPODatasetBuilderFromComparisons(ChatDatasetBuilder):
    """Pairs of chosen and rejected answers for direct preference optimization.

    Comparisons that cannot be trained are skipped and counted by reason in the datasets'
    ``dropped``. ``swap`` of the comparison builder has no effect. Held-out ties are always dropped.
    """

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="Source of the comparisons")
    ties: Ties = chz.field(default="drop", doc="drop, or half: both orders with half the weight")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads the comparisons; they are rendered batch by batch."""
        self.check()
        train, test = self.comparison_builder.comparison_sets
        if self.ties == "drop":
            train = without_ties(train, "training")
        train_set = self._dataset(train, self.common_config.batch_size)
        if test is None:
            return train_set, None
        test = without_ties(test, "held-out")
        return train_set, self._dataset(test, min(self.common_config.batch_size, len(test.usable)))

    def check(self) -> None:
        """Raises ConfigurationError for an invalid value; loads nothing."""
        self.common_config.check()
        if self.ties not in get_args(Ties):
            raise ConfigurationError(f"ties: got {self.ties!r}, expected 'drop' or 'half'")

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the first ``n`` distinct prompts of the held-out comparisons."""
        _, test = self.comparison_builder.comparison_sets
        return [] if test is None else test.prompts(n, self.renderer)

    def _dataset(self, comparisons: ComparisonSet, batch_size: int) -> PairDataset:
        return PairDataset(comparisons, batch_size, self.renderer, self.common_config.max_length)
