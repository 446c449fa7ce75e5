"""A base model with a snapshot of an adapter: checks what is asked of it, and scores prompts.

Drawing itself is the work of the ``batcher``. Reported log-probabilities are those of the model
(temperature 1, whole vocabulary) from the same chunked head that training uses, so they equal the
trainer's for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tinker_cookbook.engine.adapters import Adapter
from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.examples import check_token_range
from tinker_cookbook.engine.head import LoraPair
from tinker_cookbook.engine.low_rank import Terms
from tinker_cookbook.engine.requests import Prompt, Sample, SampleRequest, SamplingSettings
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

__all__ = ["PromptScores", "Sample", "Sampler", "SamplingSettings"]

MASK_LOGPROB = -99999.0


@dataclass
class PromptScores:
    """fp32 log-probabilities [T] of the prompt's tokens (NaN where not computed), and top k."""

    logprobs: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None
    topk_ids: np.ndarray | None = None


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

    @torch.no_grad()
    def score_prompt(
        self, prompt: Prompt, *, logprobs: bool, topk: int = 0, last_n: int | None = None
    ) -> PromptScores:
        """Log-probability of each prompt token given those before it, and the top k there."""
        tokens = self._check_prompt(prompt)
        if last_n is not None and not 1 <= last_n <= len(tokens) - 1:
            raise ConfigurationError(
                f"prompt_logprobs_last_n: got {last_n}, expected 1 to {len(tokens) - 1} "
                "(the prompt's length less one)"
            )
        hidden, lora = self._prompt_hidden(tokens)
        first = 1 if last_n is None else len(tokens) - last_n
        hidden = hidden[first - 1 :]
        scores = PromptScores()
        if logprobs:
            scores.logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
            targets = torch.from_numpy(tokens[first:]).to(self.base.device)
            values = self.base.head.logprobs(hidden, targets, lora)
            scores.logprobs[first:] = values.cpu().numpy()
        if topk:
            values, ids = self.base.head.topk(hidden, topk, lora)
            scores.topk_logprobs = np.full((len(tokens), topk), MASK_LOGPROB, dtype=np.float32)
            scores.topk_ids = np.zeros((len(tokens), topk), dtype=np.int32)
            scores.topk_logprobs[first:] = values.cpu().numpy()
            scores.topk_ids[first:] = ids.cpu().numpy()
        return scores

    @torch.no_grad()
    def score_targets(self, prompt: Prompt, targets: torch.Tensor) -> np.ndarray:
        """fp32 log-probabilities of ``targets`` [T - 1, K] at each position after the first."""
        tokens = self._check_prompt(prompt)
        if targets.dim() != 2 or len(targets) != len(tokens) - 1:
            raise DataValidationError(
                f"target_prompt_logprobs: has shape {tuple(targets.shape)}, expected "
                f"({len(tokens) - 1}, K): K tokens for each position after the first"
            )
        check_token_range("target_prompt_logprobs", targets.cpu().numpy(), self.base.vocab_size)
        hidden, lora = self._prompt_hidden(tokens)
        values = self.base.head.logprobs(hidden, targets.to(self.base.device), lora)
        return values.cpu().numpy()

    def _prompt_hidden(self, prompt: np.ndarray) -> tuple[torch.Tensor, LoraPair | None]:
        """Hidden states [T - 1, H] that predict the tokens after the first."""
        terms = self.terms()
        tokens = torch.from_numpy(prompt).to(self.base.device)
        with self.base.adapted(terms):
            hidden = self.base.hidden(tokens[None])
        return hidden[0, :-1], self.base.unembed_pair(terms)

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
