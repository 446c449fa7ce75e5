"""Preference models: the probability that one of two answers is preferred, and its evaluation.

The model is trained to predict the label of a comparison, by cross-entropy on the label's token.
With two labels this is the Bradley-Terry model (Bradley & Terry 1952, Biometrika 39; Christiano et
al. 2017, arXiv 1706.03741), in which the log-odds of the label tokens are the difference of the
answers' rewards; a third label adds ties.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import chz
import numpy as np

from tinker_cookbook.backends import SamplingClient, ServiceClient
from tinker_cookbook.backends.connect import check_backend, make_once
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.judges.labels import label_logprobs, mean_logprobs
from tinker_cookbook.preference.comparison import (
    LABELS,
    SWAPPED,
    Comparison,
    ComparisonRendererFromChatRenderer,
    Label,
    LabeledComparison,
    comparisons_that_fit,
    label_of_text,
)
from tinker_cookbook.renderers import Renderer, check_renderer_name, get_renderer
from tinker_cookbook.run.weights_paths import check_tinker_path, weights_field
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import BackendSettings, setting
from tinker_cookbook.utils.imports import tinker

logger = logging.getLogger(__name__)


class PreferenceModel(ABC):
    """Model that scores comparisons."""

    @abstractmethod
    async def __call__(self, comparison: Comparison) -> float:
        """Returns the preference from -1 (A is better) to 1 (B is better)."""


class PreferenceModelBuilder(ABC):
    """Builder of a preference model."""

    @abstractmethod
    def __call__(self) -> PreferenceModel:
        """Builds the model."""


class PreferenceModelFromChatRenderer(PreferenceModel):
    """Language model that labels a comparison with A, B or Tie.

    The reward is ``P(B) - P(A)``, with the probabilities of the label tokens normalised over the
    three labels. ``greedy`` samples the most probable token instead: -1, 0 or 1, and 0 for a token
    that is not a label.

    ``both_orders`` scores the comparison in both orders and averages the log-odds, in
    which a position bias cancels (``mean_logprobs``).
    """

    def __init__(
        self,
        convo_renderer: Renderer,
        sampling_client: SamplingClient,
        greedy: bool = False,
        *,
        both_orders: bool = False,
    ) -> None:
        _check_scoring(greedy, both_orders)
        self.comparison_renderer = ComparisonRendererFromChatRenderer(convo_renderer)
        self.sampling_client = sampling_client
        self.greedy, self.both_orders = greedy, both_orders

    async def __call__(self, comparison: Comparison) -> float:
        """Returns the reward of B over A, from -1 to 1."""
        if self.greedy:
            return await self._greedy_reward(comparison)
        if self.both_orders:
            # The mean over both orders cancels a position bias in the log-odds.
            first, second = await asyncio.gather(
                self.label_logprobs(comparison), self.label_logprobs(comparison.swap())
            )
            swapped: dict[Label, float] = {x: second[SWAPPED[x]] for x in LABELS}
            logprobs = mean_logprobs([first, swapped])
        else:
            logprobs = await self.label_logprobs(comparison)
        return math.exp(logprobs["B"]) - math.exp(logprobs["A"])

    async def label_logprobs(self, comparison: Comparison) -> dict[Label, float]:
        """Returns the log-probability of each label in nats; the probabilities sum to 1."""
        renderer = self.comparison_renderer
        prompt = renderer.build_label_prompt(comparison)
        return await label_logprobs(self.sampling_client, prompt, renderer.label_tokens)

    async def _greedy_reward(self, comparison: Comparison) -> float:
        response = await self.sampling_client.sample(
            self.comparison_renderer.build_generation_prompt(comparison),
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=1, temperature=0.0),
        )
        text = str(self.comparison_renderer.tokenizer.decode(response.sequences[0].tokens))
        label = label_of_text(text)
        if label is None:
            logger.warning(
                "the preference model sampled %r, which is not a label; the reward is 0", text
            )
        return {"A": -1.0, "B": 1.0, "Tie": 0.0, None: 0.0}[label]


def _check_scoring(greedy: bool, both_orders: bool) -> None:
    if greedy and both_orders:
        raise ConfigurationError(
            "both_orders: got True with greedy=True, expected only one of them: a single token "
            "has no log-odds to average"
        )


@chz.chz
class PreferenceModelBuilderFromChatRenderer(PreferenceModelBuilder, BackendSettings):
    """Builder of a preference model; equal configs share one per process.

    Without ``rm_weights_path`` the base model labels comparisons as it is. It reads no instruction
    but the headers of a comparison, so measure it first (``PreferenceModelEvaluator``).
    """

    renderer_name: str = chz.field(doc="Chat format, used in its training if it is trained")
    model_name: str = chz.field(doc="Hub name or local folder of the base model")
    rm_weights_path: str | None = weights_field(
        "sampler_weights", "Its weights; default: the base model, untrained"
    )
    greedy: bool = setting(False, "Judge only by the most probable label")
    both_orders: bool = setting(False, "Judge both orders and average the log-odds")

    def check(self) -> None:
        """Raises ConfigurationError for an invalid value; loads nothing."""
        _check_scoring(self.greedy, self.both_orders)
        check_renderer_name(self.renderer_name)
        check_backend(self.backend, self.base_url, self.device, self.dtype)
        check_tinker_path(
            "rm_weights_path",
            self.rm_weights_path,
            "sampler_weights",
            "the run that trained the preference model",
        )

    def __call__(self) -> PreferenceModel:
        """Returns the model; CheckpointError if the weights are missing."""
        self.check()
        # Use the connection of the current run, if there is one, so that a common base model is
        # loaded once.
        return make_once(self, self.build)

    def build(self, service: ServiceClient) -> PreferenceModelFromChatRenderer:
        """Builds the model on ``service``."""
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name))
        path = self.rm_weights_path
        client = service.create_sampling_client(
            model_path=path, base_model=self.model_name if path is None else None
        ).result()
        return PreferenceModelFromChatRenderer(
            renderer, client, self.greedy, both_orders=self.both_orders
        )


class PreferenceModelEvaluator(SamplingClientEvaluator):
    """Accuracy and loss of a reward model on held-out comparisons.

    Each comparison is judged in both orders, unless ``both_ways`` is false. Metrics, after
    ``NAME/``:

    ``accuracy``
        Share of judgements in which the preferred answer has the higher probability; equal
        probabilities count half, ties are excluded. About 0.5 at step 0; rises to 1.
    ``nll``
        Mean of ``-log P(label)`` in nats. ln 3 = 1.10 for a uniform model; falls to 0.
    ``position_bias``
        Mean of ``P(B) - P(A)``: with both orders, 0 for a model without position bias, 1 for a
        model that always prefers the second answer.
    ``num_judgements``, ``num_too_long``
        Number of judgements, and of comparisons longer than ``max_length``, which are skipped.
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
        # Comparisons longer than the context cannot be scored; num_too_long counts them.
        kept = comparisons_that_fit(comparisons, renderer, max_length)
        self._num_too_long = len(comparisons) - len(kept)
        self._judged = [c for one in kept for c in ((one, one.swap()) if both_ways else (one,))]
        self._renderer, self._name = renderer, name
        self._max_concurrency = max_concurrency

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Computes the metrics of the client's weights."""
        model = PreferenceModelFromChatRenderer(self._renderer, sampling_client)
        limit = asyncio.Semaphore(self._max_concurrency)

        async def judge(labeled: LabeledComparison) -> dict[Label, float]:
            async with limit:
                return await model.label_logprobs(labeled.comparison)

        logprobs = await asyncio.gather(*map(judge, self._judged))
        pairs = list(zip(self._judged, logprobs, strict=True))
        # 1 if the preferred answer is more probable, 0.5 if both are equal, otherwise 0.
        margins = [
            found["A"] - found["B"] if labeled.label == "A" else found["B"] - found["A"]
            for labeled, found in pairs
            if labeled.label != "Tie"
        ]
        # Map -1, 0 and 1 to 0, 0.5 and 1.
        right = (np.sign(margins) + 1) / 2
        bias = [math.exp(found["B"]) - math.exp(found["A"]) for found in logprobs]
        metrics = {
            "accuracy": float(right.mean()) if margins else math.nan,
            "nll": float(np.mean([-found[labeled.label] for labeled, found in pairs])),
            "position_bias": float(np.mean(bias)),
            "num_judgements": float(len(pairs)),
        }
        if self._num_too_long:
            metrics["num_too_long"] = float(self._num_too_long)
        return {f"{self._name}/{key}": value for key, value in metrics.items()}
