"""A base model with a snapshot of an adapter: checks what is asked of it.

Drawing is the work of the ``batcher``, scoring given texts that of ``scoring``. Reported
log-probabilities are those of the model (temperature 1, whole vocabulary) from the same chunked
head that training uses, so they equal the trainer's for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinker_cookbook.engine.adapters import Adapter
from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.examples import check_token_range
from tinker_cookbook.engine.head import LoraPair
from tinker_cookbook.engine.low_rank import Terms
from tinker_cookbook.engine.requests import Prompt, Sample, SampleRequest, SamplingSettings
from tinker_cookbook.engine.scoring import PromptScores, ScoreRequest
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

__all__ = ["PromptScores", "Sample", "Sampler", "SamplingSettings"]


class Sampler:
    """Draws from ``base`` with an adapter, which never changes while the sampler lives."""

    def __init__(self, base: BaseModel, adapter: Adapter | None) -> None:
        self.base = base
        self._adapter = adapter
        self._terms: Terms | None = None

    def request(
        self,
        prompt: Prompt,
        num_samples: int,
        settings: SamplingSettings,
        *,
        decode: Callable[[list[int]], str] | None = None,
        topk_sample: int = 0,
    ) -> SampleRequest:
        """A request for ``num_samples`` continuations of ``prompt`` (token ids, at least one)."""
        tokens = self._check_prompt(prompt)
        if num_samples < 1:
            raise ConfigurationError(f"num_samples: got {num_samples}, expected at least 1")
        if settings.stop_strings and decode is None:
            raise ConfigurationError("stop: strings need a tokenizer; give decode")
        room = self.base.context_length - len(tokens)
        limit = room if settings.max_tokens is None else min(settings.max_tokens, room)
        if limit < 1:
            raise DataValidationError(
                f"prompt: {len(tokens)} tokens leave no room in the model's context of "
                f"{self.base.context_length}; shorten the prompt"
            )
        return SampleRequest(self, tokens, num_samples, settings, limit, decode, topk_sample)

    def terms(self) -> Terms:
        """The adapter as layers apply it."""
        if self._terms is None:
            self._terms = {} if self._adapter is None else self._adapter.terms(self.base.dtype)
        return self._terms

    def unembed_pair(self) -> LoraPair | None:
        """The part of ``terms`` that belongs to the unembedding layer."""
        low_rank = self.terms().get(self.base.unembed_name)
        return None if low_rank is None else low_rank.by_column

    def score_request(
        self,
        prompt: Prompt,
        *,
        logprobs: bool = False,
        topk: int = 0,
        targets: np.ndarray | None = None,
        last_n: int | None = None,
    ) -> ScoreRequest:
        """A request for scores of ``prompt``, each token given those before it.

        Args:
            prompt: Token ids [T], at least one.
            logprobs: Whether the tokens' own log-probabilities are asked for.
            topk: So many of the most probable tokens at each position.
            targets: Token ids [T - 1, K] to be scored at each position after the first.
            last_n: ``logprobs`` and ``topk`` for the last positions alone.
        """
        tokens = self._check_prompt(prompt)
        if last_n is not None and not 1 <= last_n <= len(tokens) - 1:
            raise ConfigurationError(
                f"prompt_logprobs_last_n: got {last_n}, expected 1 to {len(tokens) - 1} "
                "(the prompt's length less one)"
            )
        if not 0 <= topk <= self.base.vocab_size:
            raise ConfigurationError(
                f"topk_prompt_logprobs: got {topk}, expected 0 to {self.base.vocab_size} "
                "(the vocabulary)"
            )
        if targets is not None:
            self._check_targets(targets, len(tokens) - 1)
        first = 1 if last_n is None else len(tokens) - last_n
        return ScoreRequest(self, tokens, logprobs, topk, targets, first)

    def _check_targets(self, targets: np.ndarray, positions: int) -> None:
        if targets.ndim != 2 or len(targets) != positions:
            raise DataValidationError(
                f"target_prompt_logprobs: has shape {targets.shape}, expected "
                f"({positions}, K): K tokens for each position after the first"
            )
        if targets.size:
            check_token_range("target_prompt_logprobs", targets, self.base.vocab_size)

    def _check_prompt(self, prompt: Prompt) -> np.ndarray:
        tokens = np.asarray(prompt, dtype=np.int64)
        if not len(tokens):
            raise DataValidationError("prompt: got no token, expected at least one")
        check_token_range("prompt", tokens, self.base.vocab_size)
        if len(tokens) > self.base.context_length:
            raise DataValidationError(
                f"prompt: {len(tokens)} tokens, but the model's context is "
                f"{self.base.context_length}; shorten the prompt"
            )
        return tokens
