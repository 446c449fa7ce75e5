"""Datasets for DPO: comparisons as pairs of datums, alternating chosen and rejected."""

from __future__ import annotations

import chz
import numpy as np

from tinker_cookbook.exceptions import DataValidationError
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


class PairDataset(ComparisonDataset):
    """Batches of pairs: ``[chosen_0, rejected_0, chosen_1, rejected_1, …]``.

    A batch of N comparisons is 2N datums. Weights are 1 on the tokens of each answer's assistant
    messages and 0 on the prompt: the loss uses the log-probability of whole answers, without a mean
    over tokens. ``max_length`` truncates answers; a comparison with a prompt that fills it is
    skipped.
    """

    def __init__(
        self,
        comparisons: ComparisonSet,
        batch_size: int,
        renderer: Renderer,
        max_length: int | None = None,
    ) -> None:
        self._renderer, self._max_length = renderer, max_length
        super().__init__(comparisons, batch_size, self._to_data)

    def _to_data(self, labeled: LabeledComparison) -> list[tinker.Datum] | str:
        # Answers of earlier turns are common to both sides of a pair, so do not train on them.
        prompt: list[Message] = [
            {**message, "trainable": False} for message in labeled.comparison.prompt(self._renderer)
        ]
        data: list[tinker.Datum] = []
        for answer in labeled.chosen_and_rejected():
            marked: list[Message] = [
                {**message, "trainable": message["role"] == "assistant"} for message in answer
            ]
            model_input, weights = self._renderer.build_supervised_example(
                [*prompt, *marked], TrainOnWhat.CUSTOMIZED
            )
            check_images_fit(model_input, self._max_length)
            datum = datum_from_model_input_weights(model_input, weights, self._max_length)
            # The prompt fills max_length, so no answer token is left.
            if not count_loss_tokens(datum):
                return SkipReason.LONG_PROMPT
            data.append(datum)
        chosen, rejected = (d.loss_fn_inputs["target_tokens"].to_numpy() for d in data)
        # Truncation may have removed the difference.
        return SkipReason.EQUAL_WHEN_CUT if np.array_equal(chosen, rejected) else data


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

    Comparisons that cannot be trained, and ties, are skipped and counted by reason in the datasets'
    ``dropped``. ``swap`` of the comparison builder has no effect.
    """

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="Source of the comparisons")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads the comparisons; they are rendered batch by batch."""
        self.common_config.check()
        train, test = self.comparison_builder.comparison_sets
        batch_size = self.common_config.batch_size
        train_set = self._dataset(without_ties(train, "training"), batch_size)
        if test is None:
            return train_set, None
        test = without_ties(test, "held-out")
        return train_set, self._dataset(test, min(batch_size, len(test.usable)))

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the first ``n`` distinct prompts of the held-out comparisons."""
        _, test = self.comparison_builder.comparison_sets
        return [] if test is None else test.prompts(n, self.renderer)

    def _dataset(self, comparisons: ComparisonSet, batch_size: int) -> PairDataset:
        return PairDataset(comparisons, batch_size, self.renderer, self.common_config.max_length)
