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
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.backends.connect import check_backend, connect
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.comparison import LABELS, Comparison, Label
from tinker_cookbook.preference.comparison_renderer import (
    ComparisonRendererFromChatRenderer,
    label_of_text,
)
from tinker_cookbook.renderers import Renderer, check_renderer_name, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient, ServiceClient
else:
    tinker = lazy_module("tinker")

logger = logging.getLogger(__name__)

_TOPK = 20
"""Log-probabilities asked for with the label's token. A model that knows its task puts the three
labels first; those that are not among them are asked for one by one."""

_NEGLIGIBLE = 1e-4
"""Share of the labels' probability that does not change a reward to speak of."""

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
    """

    def __init__(
        self, convo_renderer: Renderer, sampling_client: SamplingClient, greedy: bool = False
    ) -> None:
        self.comparison_renderer = ComparisonRendererFromChatRenderer(convo_renderer)
        self.sampling_client = sampling_client
        self.greedy = greedy

    async def __call__(self, comparison: Comparison) -> float:
        """The reward of B over A, from -1 to 1."""
        if self.greedy:
            return await self._greedy_reward(comparison)
        logprobs = await self.label_logprobs(comparison, exact=())
        return math.exp(logprobs["B"]) - math.exp(logprobs["A"])

    async def label_logprobs(
        self, comparison: Comparison, exact: Collection[Label] = LABELS
    ) -> dict[Label, float]:
        """Log-probability of each label in nats; the probabilities add up to 1.

        The model runs once for all labels among its most probable tokens, and once more for each
        other one. Of those, labels that are not in ``exact`` and cannot have 0.01% of the
        probability of the labels found are left at ``-inf`` instead.
        """
        prompt = self.comparison_renderer.build_label_prompt(comparison)
        response = await self.sampling_client.sample(
            prompt,
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=1, temperature=0.0),
            topk_sample_logprobs=_TOPK,
        )
        best = dict((response.sequences[0].topk_logprobs or [None])[0] or [])
        tokens = self.comparison_renderer.label_tokens
        found: dict[Label, float] = {}
        for label in LABELS:
            if tokens[label] in best:
                found[label] = best[tokens[label]]
        if not _is_negligible(best, found):
            exact = LABELS
        asked: list[Label] = [label for label in LABELS if label in exact and label not in found]
        values = await asyncio.gather(*(self._logprob(prompt, tokens[label]) for label in asked))
        for label, value in zip(asked, values, strict=True):
            found[label] = value
        highest = max(found.values())
        total = highest + math.log(math.fsum(math.exp(v - highest) for v in found.values()))
        return {label: found.get(label, -math.inf) - total for label in LABELS}

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


def _is_negligible(best: dict[int, float], found: dict[Label, float]) -> bool:
    """Whether a token that is not among the ``best`` is improbable beside the labels ``found``."""
    if not best or not found:
        return False
    return min(best.values()) < max(found.values()) + math.log(_NEGLIGIBLE)


@chz.chz
class PreferenceModelBuilderFromChatRenderer(PreferenceModelBuilder):
    """A preference model from saved weights.

    Equal configs share one model in a process: it is loaded at the first call, into an engine of
    its own on the local backend. ``build`` makes it on a service that is there already, which
    saves a second copy of the same base model.
    """

    renderer_name: str = chz.field(doc="Chat format that it was trained with")
    model_name: str = chz.field(doc="Hub name or local folder of its base model")
    rm_weights_path: str = chz.field(doc="tinker:// path of its weights, for the sampler")
    base_url: str | None = chz.field(default=None, doc="URL of a Tinker server")
    backend: str = chz.field(default="auto", doc="auto, local, tinker, or the URL of a server")
    device: str = chz.field(default="auto", doc="auto, cuda, mps or cpu (local engine)")
    dtype: str = chz.field(default="auto", doc="auto, float32 or bfloat16 (local engine)")
    greedy: bool = chz.field(default=False, doc="Judge by the most probable label alone")

    def check(self) -> None:
        """Raises ConfigurationError for a value that cannot work; loads nothing."""
        check_renderer_name(self.renderer_name)
        check_backend(self.backend, self.base_url, self.device, self.dtype)
        if not self.rm_weights_path.startswith("tinker://"):
            raise ConfigurationError(
                f"rm_weights_path: got {self.rm_weights_path!r}, expected tinker://RUN/… ; the "
                "sampler_path in checkpoints.jsonl of the run that trained the preference model "
                "is one"
            )

    def __call__(self) -> PreferenceModel:
        """The model, loaded once a process; CheckpointError where there are no such weights."""
        with _making:
            if self not in _made:
                self.check()
                service = connect(
                    self.backend, base_url=self.base_url, device=self.device, dtype=self.dtype
                ).service
                _made[self] = self.build(service)
            return _made[self]

    def build(self, service: ServiceClient) -> PreferenceModelFromChatRenderer:
        """The model on ``service``."""
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name))
        client = service.create_sampling_client(model_path=self.rm_weights_path).result()
        return PreferenceModelFromChatRenderer(renderer, client, self.greedy)


_made: dict[PreferenceModelBuilderFromChatRenderer, PreferenceModel] = {}
_making = threading.Lock()
