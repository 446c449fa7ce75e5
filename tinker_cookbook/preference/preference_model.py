"""Preference models: which of two answers a model holds to be better, and how surely.

The model is trained to answer a comparison with its label, by cross-entropy on the label's token.
With two labels that is the Bradley-Terry model (Bradley & Terry 1952, Biometrika 39; Christiano et
al. 2017, arXiv 1706.03741), the log-odds of the label tokens being the difference of the answers'
rewards; a third label adds ties.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import chz
import numpy as np

from tinker_cookbook.backends.connect import check_backend
from tinker_cookbook.backends.shared import make_once
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.comparison import LABELS, SWAPPED, Comparison, Label
from tinker_cookbook.preference.comparison_renderer import (
    ComparisonRendererFromChatRenderer,
    label_of_text,
)
from tinker_cookbook.renderers import Renderer, check_renderer_name, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.run_folder.paths import check_tinker_path

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient, ServiceClient
else:
    tinker = lazy_module("tinker")

logger = logging.getLogger(__name__)

_REWARD: dict[Label, float] = {"A": -1.0, "B": 1.0, "Tie": 0.0}


class PreferenceModel(ABC):
    """Judges comparisons."""

    @abstractmethod
    async def __call__(self, comparison: Comparison) -> float:
        """-1 where A is better for sure, 1 where B is, 0 where neither is."""


class PreferenceModelBuilder(ABC):
    """A config that makes a preference model."""

    @abstractmethod
    def __call__(self) -> PreferenceModel:
        """The model, ready to judge."""


class PreferenceModelFromChatRenderer(PreferenceModel):
    """A language model that answers a comparison with A, B or Tie.

    The reward is ``P(B) - P(A)``, with the probabilities of the label tokens normalised over the
    three labels. ``greedy`` takes the most probable token instead: -1, 0 or 1, and 0 for a token
    that is no label.

    ``both_orders`` asks twice, with either answer first, and takes the mean of the log-odds. What a
    judge has for a place is a constant there, as in a Bradley-Terry model with an order effect
    (Davidson & Beaver 1977, Biometrics 33), and cancels; of probabilities close to 0 or 1, which
    such a liking makes, the mean tells hardly anything.
    """

    def __init__(
        self,
        convo_renderer: Renderer,
        sampling_client: SamplingClient,
        greedy: bool = False,
        *,
        both_orders: bool = False,
    ) -> None:
        _check_asking(greedy, both_orders)
        self.comparison_renderer = ComparisonRendererFromChatRenderer(convo_renderer)
        self.sampling_client = sampling_client
        self.greedy, self.both_orders = greedy, both_orders

    async def __call__(self, comparison: Comparison) -> float:
        """The reward of B over A, from -1 to 1."""
        judge = self._greedy_reward if self.greedy else self._reward
        return await judge(comparison)

    async def _reward(self, comparison: Comparison) -> float:
        if not self.both_orders:
            logprobs = await self.label_logprobs(comparison)
        else:
            first, second = await asyncio.gather(
                self.label_logprobs(comparison), self.label_logprobs(comparison.swap())
            )
            logprobs = _normalised(
                {label: (first[label] + second[SWAPPED[label]]) / 2 for label in LABELS}
            )
        return math.exp(logprobs["B"]) - math.exp(logprobs["A"])

    async def label_logprobs(self, comparison: Comparison) -> dict[Label, float]:
        """Log-probability of each label in nats; the probabilities add up to 1.

        Scored rather than sampled: what a score is, to the last bit, does not depend on what else
        the bundled engine has in hand, so a resumed run earns the same rewards. It also reads
        once what the labels, and the comparisons that are asked about together, begin with.
        """
        prompt = self.comparison_renderer.build_label_prompt(comparison)
        tokens = self.comparison_renderer.label_tokens
        found = await asyncio.gather(*(self._logprob(prompt, tokens[label]) for label in LABELS))
        return _normalised(dict(zip(LABELS, found, strict=True)))

    async def _logprob(self, prompt: tinker.ModelInput, token: int) -> float:
        """Log-probability of ``token`` behind ``prompt``."""
        value = (await self.sampling_client.compute_logprobs(prompt.append_int(token)))[-1]
        assert value is not None, "only the first token of a prompt has no log-probability"
        return value

    async def _greedy_reward(self, comparison: Comparison) -> float:
        response = await self.sampling_client.sample(
            self.comparison_renderer.build_generation_prompt(comparison),
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=1, temperature=0.0),
        )
        text = str(self.comparison_renderer.tokenizer.decode(response.sequences[0].tokens))
        label = label_of_text(text)
        if label is None:
            logger.warning("the preference model answered %r, which is no label: taken as 0", text)
            return 0.0
        return _REWARD[label]


def _check_asking(greedy: bool, both_orders: bool) -> None:
    if greedy and both_orders:
        raise ConfigurationError(
            "both_orders: got True beside greedy=True, expected one of them: a single token "
            "has no log-odds to take the mean of"
        )


def _normalised(logprobs: dict[Label, float]) -> dict[Label, float]:
    """Log-probabilities whose probabilities add up to 1."""
    total = float(np.logaddexp.reduce(list(logprobs.values())))
    return {label: value - total for label, value in logprobs.items()}


@chz.chz
class PreferenceModelBuilderFromChatRenderer(PreferenceModelBuilder):
    """A preference model from saved weights.

    Equal configs share one model in a process, made at the first call on the connection that the
    run in progress has open, so that an equal base model is not loaded twice; or on one of its own.
    ``build`` makes it on a given service.
    """

    renderer_name: str = chz.field(doc="Chat format that it was trained with")
    model_name: str = chz.field(doc="Hub name or local folder of its base model")
    rm_weights_path: str = chz.field(doc="tinker:// path of its weights, for the sampler")
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server")
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu (local engine)")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16 (local engine)")
    greedy: bool = chz.field(default=False, doc="Judge by the most probable label alone")
    both_orders: bool = chz.field(default=False, doc="Judge both orders, average the log-odds")

    def check(self) -> None:
        """Raises ConfigurationError for a value that cannot work; loads nothing."""
        _check_asking(self.greedy, self.both_orders)
        check_renderer_name(self.renderer_name)
        check_backend(self.backend, self.base_url, self.device, self.dtype)
        check_tinker_path(
            "rm_weights_path",
            self.rm_weights_path,
            "sampler_weights",
            "the run that trained the preference model",
        )

    def __call__(self) -> PreferenceModel:
        """The model, made once a connection; CheckpointError where there are no such weights."""
        self.check()
        return make_once(self, self.build)

    def build(self, service: ServiceClient) -> PreferenceModelFromChatRenderer:
        """The model on ``service``."""
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name))
        client = service.create_sampling_client(model_path=self.rm_weights_path).result()
        return PreferenceModelFromChatRenderer(
            renderer, client, self.greedy, both_orders=self.both_orders
        )
