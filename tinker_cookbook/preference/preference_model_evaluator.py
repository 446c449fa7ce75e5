"""How well a reward model predicts labels that it was not trained on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference.comparison import Label, LabeledComparison
from tinker_cookbook.preference.comparison_lengths import comparisons_that_fit
from tinker_cookbook.preference.preference_model import PreferenceModelFromChatRenderer
from tinker_cookbook.renderers import Renderer

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient


class PreferenceModelEvaluator(SamplingClientEvaluator):
    """Accuracy and loss of the labels that a reward model gives to held-out comparisons.

    Each comparison is judged in both orders, unless ``both_ways`` is false.

    Metrics, with ``NAME`` before each:

    ``accuracy``
        Share of judgements in which the preferred answer gets the higher probability; a judgement
        without a difference counts half. Ties are not in it; NaN where there are only ties. About
        0.5 at step 0 (exactly so both ways for a model that sees only the place); rises to 1.
    ``nll``
        Mean of ``-log P(label)`` in nats over all judgements, with the probabilities of the three
        labels adding up to 1. ln 3 = 1.10 for a model without a clue and ln 2 = 0.69 for one that
        knows that there are no ties; falls to 0.
    ``position_bias``
        Mean of ``P(B) - P(A)``: both ways, 0 for a model that does not care which comes first, 1
        for one that always says B, -1 for A. Should come to 0.
    ``num_judgements``
        How many there were.
    ``num_too_long``
        Comparisons that were left out because they are longer than ``max_length`` tokens; not there
        where all fit.
    """

    def __init__(
        self,
        comparisons: Sequence[LabeledComparison],
        renderer: Renderer,
        name: str = "rm",
        both_ways: bool = True,
        max_concurrency: int = 64,
        max_length: int | None = None,
    ) -> None:
        if not comparisons:
            raise DataValidationError("comparisons: got none, expected at least one")
        if max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency: got {max_concurrency}, expected at least 1")
        kept = comparisons_that_fit(comparisons, renderer, max_length)
        self._num_too_long = len(comparisons) - len(kept)
        self._judged = [c for one in kept for c in ((one, one.swap()) if both_ways else (one,))]
        self._renderer, self._name = renderer, name
        self._max_concurrency = max_concurrency

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """The metrics of the weights that the client holds."""
        model = PreferenceModelFromChatRenderer(self._renderer, sampling_client)
        gate = asyncio.Semaphore(self._max_concurrency)

        async def judge(labeled: LabeledComparison) -> dict[Label, float]:
            async with gate:
                return await model.label_logprobs(labeled.comparison)

        logprobs = await asyncio.gather(*map(judge, self._judged))
        pairs = list(zip(self._judged, logprobs, strict=True))
        right = [_right(labeled, found) for labeled, found in pairs if labeled.label != "Tie"]
        metrics = {
            "accuracy": float(np.mean(right)) if right else math.nan,
            "nll": float(np.mean([-found[labeled.label] for labeled, found in pairs])),
            "position_bias": float(
                np.mean([math.exp(found["B"]) - math.exp(found["A"]) for found in logprobs])
            ),
            "num_judgements": float(len(pairs)),
        }
        if self._num_too_long:
            metrics["num_too_long"] = float(self._num_too_long)
        return {f"{self._name}/{key}": value for key, value in metrics.items()}


def _right(labeled: LabeledComparison, logprobs: dict[Label, float]) -> float:
    """1 where the preferred answer is the more probable one, 0.5 where neither is."""
    margin = logprobs["A"] - logprobs["B"]
    return float(np.sign(margin if labeled.label == "A" else -margin) + 1) / 2
