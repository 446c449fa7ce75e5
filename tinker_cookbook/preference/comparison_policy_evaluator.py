"""Win rate of a policy against an opponent, judged by a preference model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.eval.statistics import wilson_interval
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.preference.comparison import Comparison
from tinker_cookbook.preference.preference_model import PreferenceModel
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer

_POLICY, _BASELINE = 0, 1  # with different seeds


class ComparisonEvaluator(SamplingClientEvaluator):
    """Win rate of a policy's answers against answers of the data or a baseline.

    The opponent is ``completion_A`` of each comparison, or the answer of the sampling
    client ``baseline`` to the same prompt. The policy's answer is judged as B and, with
    ``both_ways``, also as A, so that position bias cancels. Seeds are derived from ``seed`` and the
    index of the comparison, so every evaluation has the same sampling noise.

    ``win_rate``, ``win_rate_low``, ``win_rate_high``, ``stderr``
        Mean of the answers' scores, from 0 (certainly worse) to 1 (certainly better), its 95%
        interval and its standard error. 0.5 at step 0 against the policy that training starts from.
    ``answer_tokens``, ``num_comparisons``
        Mean length of the policy's answers (judges often prefer longer ones), and their number.
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
        """Computes the metrics of the client's weights."""
        # In a thread: the first call loads a model and would block the event loop.
        model = await asyncio.to_thread(self.preference_model_builder)
        # Opponents first: a baseline is sampled only at the first evaluation.
        if self._against is None:
            self._against = [comparison.completion_A for comparison in self.comparisons]
            if self._baseline is not None:
                sampled = await self._answers(self._baseline, _BASELINE)
                self._against = [completion for completion, _ in sampled]
        answers = await self._answers(sampling_client, _POLICY)
        limit = asyncio.Semaphore(self.max_concurrency)

        async def score(comparison: Comparison) -> float:
            """Returns the score of the policy's answer (B) from 0 to 1."""
            async with limit:
                if not self.both_ways:
                    # Map the preference from [-1, 1] to [0, 1].
                    return (await model(comparison) + 1) / 2
                as_b, as_a = await asyncio.gather(model(comparison), model(comparison.swap()))
                # Mean of both orders. In the second order the policy's answer is A, so flip the
                # sign.
                return (as_b - as_a + 2) / 4

        # The opponent's answer is A, the policy's B, as ``score`` expects.
        judged = [
            replace(comparison, completion_A=other, completion_B=completion)
            for comparison, other, (completion, _) in zip(
                self.comparisons, self._against, answers, strict=True
            )
        ]
        metrics = win_rate_metrics(await asyncio.gather(*map(score, judged)))
        metrics["answer_tokens"] = float(np.mean([tokens for _, tokens in answers]))
        return metrics

    async def _answers(self, client: SamplingClient, who: int) -> list[tuple[list[Message], int]]:
        """Samples an answer to every prompt; returns each with its number of tokens."""
        limit = asyncio.Semaphore(self.max_concurrency)
        complete = TinkerTokenCompleter(client, self.max_tokens, self.temperature, seed=self.seed)

        async def answer(number: int, comparison: Comparison) -> tuple[list[Message], int]:
            async with limit:
                # A seed per answer, so that concurrency does not change the samples.
                done = await complete.derived(number, who)(
                    self.renderer.build_generation_prompt(comparison.prompt(self.renderer)),
                    self.renderer.get_stop_sequences(),
                )
            text = get_text_content(self.renderer.parse_response(done.tokens)[0])
            if self.content_preprocessor is not None:
                text = self.content_preprocessor(text)
            return [Message(role="assistant", content=text)], len(done.tokens)

        return list(await asyncio.gather(*(answer(i, c) for i, c in enumerate(self.comparisons))))


def win_rate_metrics(scores: Sequence[float]) -> dict[str, float]:
    """Computes the mean of scores from 0 to 1, its standard error and its 95% Wilson interval."""
    values = np.asarray(scores, dtype=np.float64)
    count, mean = len(values), float(values.mean())
    # A custom preference model may exceed the bounds by rounding.
    low, high = wilson_interval(min(max(mean, 0.0), 1.0) * count, count, z=1.959964)
    return {
        "win_rate": mean,
        "stderr": float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan,
        "win_rate_low": low,
        "win_rate_high": high,
        "num_comparisons": float(count),
    }
