"""Win rate of a policy against other answers, as judged by a preference model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference.comparison import Comparison
from tinker_cookbook.preference.preference_model import PreferenceModel
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient

_Z95 = 1.959964
"""Half width of the 95% interval of a normal distribution, in standard deviations."""

_POLICY, _BASELINE = 0, 1


@dataclass(frozen=True)
class _Answer:
    completion: list[Message]
    tokens: int


class ComparisonEvaluator(SamplingClientEvaluator):
    """Win rate of a policy's answers against those of the data, or of a baseline.

    The opponent is ``completion_A`` of each comparison; with ``baseline``, a sampling client, that
    client's answer to the same prompt. The policy's answer is judged as B and, with ``both_ways``,
    also as A, so that position bias cancels. The samples follow from ``seed`` and the index of the
    comparison, so every evaluation has the same noise.

    Metrics:

    ``win_rate``
        Mean of the answers' scores, each from 0 (worse for sure) to 1 (better for sure). 0.5 for
        a policy whose answers are as good; higher is better. Against the policy that training
        starts from, it is 0.5 at step 0 up to chance.
    ``stderr``
        Standard error of that mean; NaN for a single comparison.
    ``win_rate_low``, ``win_rate_high``
        Its 95% interval (Wilson 1927, J. Am. Stat. Assoc. 22), somewhat too wide where scores are
        fractions.
    ``answer_tokens``
        Mean length of the policy's answers: judges often prefer longer answers.
    ``num_comparisons``
        How many there were.
    """

    def __init__(
        self,
        preference_model_builder: Callable[[], PreferenceModel],
        comparisons: Sequence[Comparison],
        renderer_name: str,
        model_name_for_tokenizer: str,
        both_ways: bool = True,
        max_tokens: int = 1024,
        content_preprocessor: Callable[[str], str] | None = None,
        *,
        baseline: SamplingClient | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        max_concurrency: int = 64,
    ) -> None:
        if not comparisons:
            raise DataValidationError("comparisons: got none, expected at least one")
        if max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency: got {max_concurrency}, expected at least 1")
        self.preference_model_builder = preference_model_builder
        self.comparisons = list(comparisons)
        self.renderer = get_renderer(renderer_name, get_tokenizer(model_name_for_tokenizer))
        self.both_ways = both_ways
        self.max_tokens, self.temperature, self.seed = max_tokens, temperature, seed
        self.content_preprocessor = content_preprocessor
        self.max_concurrency = max_concurrency
        self._baseline = baseline
        self._against: list[list[Message]] | None = None

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Computes the metrics for the weights of the client."""
        # In a thread: the first call loads a model and would block the event loop.
        model = await asyncio.to_thread(self.preference_model_builder)
        # Opponents first: a baseline is sampled at the first evaluation only.
        against = await self._answers_against()
        answers = await self._answers(sampling_client, _POLICY)
        tasks = [
            replace(comparison, completion_A=other, completion_B=answer.completion)
            for comparison, other, answer in zip(self.comparisons, against, answers, strict=True)
        ]
        limit = asyncio.Semaphore(self.max_concurrency)
        scores = await asyncio.gather(*(self._score(model, task, limit) for task in tasks))
        metrics = win_rate_metrics(scores)
        metrics["answer_tokens"] = float(np.mean([answer.tokens for answer in answers]))
        return metrics

    async def _answers_against(self) -> list[list[Message]]:
        """Returns the opponents' answers; a baseline is sampled once."""
        if self._against is None:
            if self._baseline is None:
                self._against = [comparison.completion_A for comparison in self.comparisons]
            else:
                answers = await self._answers(self._baseline, _BASELINE)
                self._against = [answer.completion for answer in answers]
        return self._against

    async def _answers(self, client: SamplingClient, who: int) -> list[_Answer]:
        limit = asyncio.Semaphore(self.max_concurrency)
        complete = TinkerTokenCompleter(client, self.max_tokens, self.temperature, seed=self.seed)

        async def answer(number: int, comparison: Comparison) -> _Answer:
            async with limit:
                done = await complete.derived(number, who)(
                    self.renderer.build_generation_prompt(comparison.prompt_conversation),
                    self.renderer.get_stop_sequences(),
                )
            text = get_text_content(self.renderer.parse_response(done.tokens)[0])
            if self.content_preprocessor is not None:
                text = self.content_preprocessor(text)
            return _Answer([{"role": "assistant", "content": text}], len(done.tokens))

        return list(await asyncio.gather(*(answer(i, c) for i, c in enumerate(self.comparisons))))

    async def _score(
        self, model: PreferenceModel, comparison: Comparison, limit: asyncio.Semaphore
    ) -> float:
        """Returns the score of B, the policy's answer, from 0 to 1."""
        async with limit:
            if not self.both_ways:
                return (await model(comparison) + 1) / 2
            as_b, as_a = await asyncio.gather(model(comparison), model(comparison.swap()))
            return (as_b - as_a + 2) / 4


def win_rate_metrics(scores: Sequence[float]) -> dict[str, float]:
    """Computes the mean of scores from 0 to 1, its standard error and its 95% Wilson interval."""
    values = np.asarray(scores, dtype=np.float64)
    count, mean = len(values), float(values.mean())
    spread = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    shrunk = 1 + _Z95**2 / count
    centre = (mean + _Z95**2 / (2 * count)) / shrunk
    half = _Z95 / shrunk * math.sqrt(mean * (1 - mean) / count + _Z95**2 / (4 * count**2))
    return {
        "win_rate": mean,
        "stderr": spread,
        "win_rate_low": max(0.0, centre - half),
        "win_rate_high": min(1.0, centre + half),
        "num_comparisons": float(count),
    }
