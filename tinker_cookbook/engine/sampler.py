"""Sampling from a base model with an adapter snapshot: plain, exact, one request at a time.

The prompt is run once for all samples of a request; its cache is then repeated per sample, and
rows leave the batch as they finish. Reported log-probabilities are those of the model itself
(temperature 1, whole vocabulary) from the same chunked head that training uses, so they equal the
trainer's for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tinker_cookbook.engine.adapters import Adapter, Pairs
from tinker_cookbook.engine.base_model import BaseModel
from tinker_cookbook.engine.draw import draw_tokens
from tinker_cookbook.engine.examples import check_token_range
from tinker_cookbook.engine.head import LoraPair
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

MASK_LOGPROB = -99999.0


@dataclass(frozen=True)
class SamplingSettings:
    """How to draw.

    ``stop_tokens`` end a sample when drawn (and are kept in it); ``stop_strings`` when they
    appear in the decoded text. ``top_k`` -1 and ``top_p`` 1 mean the whole vocabulary;
    ``temperature`` 0 takes the most probable token. With ``seed``, sample i of a request depends
    on (seed, i) alone.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or none"),
            ("temperature", 0 <= self.temperature < float("inf"), "a number >= 0"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
        ):
            if not ok:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}, expected {expected}")


@dataclass
class Sample:
    """One drawn sequence: token ids, their log-probabilities, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = "length"
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


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

    @torch.no_grad()
    def sample(
        self,
        prompt: Sequence[int],
        num_samples: int,
        settings: SamplingSettings,
        *,
        decode: Callable[[list[int]], str] | None = None,
        topk_sample: int = 0,
    ) -> list[Sample]:
        """Draws ``num_samples`` continuations of ``prompt`` (token ids, at least one)."""
        prompt = self._check_prompt(prompt)
        if num_samples < 1:
            raise ConfigurationError(f"num_samples: got {num_samples}, expected at least 1")
        if settings.stop_strings and decode is None:
            raise ConfigurationError("stop: strings need a tokenizer; give decode")
        room = self.base.context_length - len(prompt)
        limit = room if settings.max_tokens is None else min(settings.max_tokens, room)
        if limit < 1:
            raise DataValidationError(
                f"prompt: {len(prompt)} tokens leave no room in the model's context of "
                f"{self.base.context_length}; shorten the prompt"
            )
        pairs = self._pairs()
        with self.base.adapted(pairs):
            decoding = _Decoding(self, pairs, settings, num_samples, decode, topk_sample)
            return decoding.run(prompt, limit)

    @torch.no_grad()
    def score_prompt(
        self, prompt: Sequence[int], *, logprobs: bool, topk: int = 0, last_n: int | None = None
    ) -> PromptScores:
        """Log-probability of each prompt token given those before it, and the top k there."""
        prompt = self._check_prompt(prompt)
        if last_n is not None and not 1 <= last_n <= len(prompt) - 1:
            raise ConfigurationError(
                f"prompt_logprobs_last_n: got {last_n}, expected 1 to {len(prompt) - 1} "
                "(the prompt's length less one)"
            )
        hidden, lora = self._prompt_hidden(prompt)
        first = 1 if last_n is None else len(prompt) - last_n
        hidden = hidden[first - 1 :]
        scores = PromptScores()
        if logprobs:
            scores.logprobs = np.full(len(prompt), np.nan, dtype=np.float32)
            targets = torch.tensor(prompt[first:], device=self.base.device)
            values = self.base.head.logprobs(hidden, targets, lora)
            scores.logprobs[first:] = values.cpu().numpy()
        if topk:
            values, ids = self.base.head.topk(hidden, topk, lora)
            scores.topk_logprobs = np.full((len(prompt), topk), MASK_LOGPROB, dtype=np.float32)
            scores.topk_ids = np.zeros((len(prompt), topk), dtype=np.int32)
            scores.topk_logprobs[first:] = values.cpu().numpy()
            scores.topk_ids[first:] = ids.cpu().numpy()
        return scores

    @torch.no_grad()
    def score_targets(self, prompt: Sequence[int], targets: torch.Tensor) -> np.ndarray:
        """fp32 log-probabilities of ``targets`` [T - 1, K] at each position after the first."""
        prompt = self._check_prompt(prompt)
        if targets.dim() != 2 or len(targets) != len(prompt) - 1:
            raise DataValidationError(
                f"target_prompt_logprobs: has shape {tuple(targets.shape)}, expected "
                f"({len(prompt) - 1}, K): K tokens for each position after the first"
            )
        check_token_range("target_prompt_logprobs", targets.cpu().numpy(), self.base.vocab_size)
        hidden, lora = self._prompt_hidden(prompt)
        values = self.base.head.logprobs(hidden, targets.to(self.base.device), lora)
        return values.cpu().numpy()

    def _prompt_hidden(self, prompt: list[int]) -> tuple[torch.Tensor, LoraPair | None]:
        """Hidden states [T - 1, H] that predict the tokens after the first."""
        pairs = self._pairs()
        with self.base.adapted(pairs):
            hidden = self.base.hidden(torch.tensor([prompt], device=self.base.device))
        return hidden[0, :-1], self.base.unembed_pair(pairs)

    def _pairs(self) -> Pairs:
        return {} if self._adapter is None else self._adapter.pairs(self.base.dtype)

    def _check_prompt(self, prompt: Sequence[int]) -> list[int]:
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise DataValidationError("prompt: got no token, expected at least one")
        check_token_range("prompt", np.array(tokens), self.base.vocab_size)
        if len(tokens) > self.base.context_length:
            raise DataValidationError(
                f"prompt: {len(tokens)} tokens, but the model's context is "
                f"{self.base.context_length}; shorten the prompt"
            )
        return tokens


class _Decoding:
    """One request's decoding loop: the rows still running, their cache and generators."""

    def __init__(
        self,
        sampler: Sampler,
        pairs: Pairs,
        settings: SamplingSettings,
        num_samples: int,
        decode: Callable[[list[int]], str] | None,
        topk: int,
    ) -> None:
        self._base = sampler.base
        self._lora = sampler.base.unembed_pair(pairs)
        self._settings = settings
        self._decode = decode
        self._topk = topk
        self.samples = [Sample() for _ in range(num_samples)]
        self._rngs = [_generator(settings.seed, index) for index in range(num_samples)]

    def run(self, prompt: list[int], limit: int) -> list[Sample]:
        """Prefills once, then steps until every row has stopped or reached ``limit``."""
        from transformers import DynamicCache

        cache: Any = DynamicCache(config=self._base.config)
        tokens = torch.tensor([prompt], device=self._base.device)
        hidden = self._base.hidden(tokens, past_key_values=cache, use_cache=True)[:, -1]
        rows = list(range(len(self.samples)))
        if len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
            hidden = hidden.expand(len(rows), -1)
        for position in range(limit):
            drawn = self._draw(hidden, rows)
            keep = [i for i, row in enumerate(rows) if not self._stopped(self.samples[row])]
            if not keep or position + 1 == limit:
                break
            if len(keep) < len(rows):
                rows = [rows[i] for i in keep]
                cache.batch_select_indices(torch.tensor(keep, device=self._base.device))
                drawn = drawn[keep]
            hidden = self._base.hidden(drawn[:, None], past_key_values=cache, use_cache=True)[:, -1]
        return self.samples

    def _draw(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Draws the next token of each running row and records it."""
        logits = self._base.head.logits(hidden, self._lora)
        logprobs = logits - logits.logsumexp(-1, keepdim=True)
        settings, count = self._settings, len(rows)
        drawn = draw_tokens(
            logits,
            np.full(count, settings.temperature),
            np.full(count, settings.top_k),
            np.full(count, settings.top_p),
            np.array([self._rngs[row].random() for row in rows]),
        )
        chosen = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
        top = logprobs.topk(self._topk, dim=-1) if self._topk else None
        for i, (row, token) in enumerate(zip(rows, drawn.tolist(), strict=True)):
            sample = self.samples[row]
            sample.tokens.append(token)
            sample.logprobs.append(chosen[i])
            if top is not None:
                sample.topk.append((top.indices[i].cpu().numpy(), top.values[i].cpu().numpy()))
        return drawn

    def _stopped(self, sample: Sample) -> bool:
        """Whether the last token ended the sample."""
        stop = sample.tokens[-1] in self._settings.stop_tokens
        if not stop and self._settings.stop_strings and self._decode is not None:
            # A stop string may end anywhere in the newest token, so look at a tail of the text
            # that is longer than any of them. A character has at most four bytes, a token at
            # least one.
            longest = max(len(text) for text in self._settings.stop_strings)
            tail = self._decode(sample.tokens[-(4 * longest + 8) :])
            stop = any(text in tail for text in self._settings.stop_strings)
        if stop:
            sample.stop_reason = "stop"
        return stop


def _generator(seed: int | None, index: int) -> np.random.Generator:
    return np.random.default_rng(None if seed is None else [seed, index])
