"""From a body to requests that the engine takes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.engine.sampling.requests import (
    Prompt,
    SampleRequest,
    SamplingSettings,
    ScoreRequest,
    sample_request,
    score_request,
)
from tinker_cookbook.server.openai.bodies import SamplingBody
from tinker_cookbook.server.openai.samplers import LoadedModel
from tinker_cookbook.server.openai.text import DrawnText

LOWEST_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON cannot say."""


@dataclass(frozen=True)
class Asked:
    """Checked requests for samples of one or several prompts, all drawn in the same way."""

    opened: LoadedModel
    settings: SamplingSettings
    num_samples: int
    topk: int | None
    """Alternatives at each token; None: log-probabilities were not asked for."""

    @classmethod
    def of(
        cls,
        body: SamplingBody,
        opened: LoadedModel,
        most_tokens: int | None,
        stops: Sequence[int | str] = (),
    ) -> Asked:
        """What ``body`` asks for; ``stops`` end an answer as well as its own."""
        base = opened.sampler.base
        topk = body.top_logprobs_asked
        settings = SamplingSettings(
            max_tokens=most_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=-1 if body.top_k is None else body.top_k,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            stop_tokens=frozenset(base.eos_ids) | {s for s in stops if isinstance(s, int)},
            stop_strings=(*body.stops, *(s for s in stops if isinstance(s, str))),
        )
        return cls(
            opened, settings, body.choices, None if topk is None else min(topk, base.vocab_size)
        )

    def request(self, prompt: Prompt) -> SampleRequest:
        """The samples of one prompt."""
        decode: Callable[[list[int]], str] | None = None
        if self.settings.stop_strings:
            decode = self.opened.codec.decode
        return sample_request(
            self.opened.sampler,
            prompt,
            self.num_samples,
            self.settings,
            decode=decode,
            topk_sample=self.topk or 0,
        )

    def scoring(self, prompt: Prompt) -> ScoreRequest:
        """The log-probabilities of one prompt's tokens."""
        return score_request(self.opened.sampler, prompt, logprobs=True, topk=self.topk or 0)

    def text(self) -> DrawnText:
        """For the tokens of one answer."""
        return DrawnText(self.opened.codec, self.settings.stop_tokens, self.settings.stop_strings)


def envelope(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What every chunk of an answer begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def json_safe_logprob(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(float(logprob), LOWEST_LOGPROB)
