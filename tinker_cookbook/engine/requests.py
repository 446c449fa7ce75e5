"""What is asked of a sampler, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError

if TYPE_CHECKING:
    from tinker_cookbook.engine.sampler import Sampler


Prompt: TypeAlias = "Sequence[int] | np.ndarray"
"""Token ids [T], at least one."""


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
    cached_prompt_tokens: int = 0
    """Tokens of the prompt that were not computed for it: another sample or turn had them."""


@dataclass(eq=False)
class SampleRequest:
    """A checked request: ``prompt`` [T] int64, and at most ``limit`` tokens for each sample."""

    sampler: Sampler
    prompt: np.ndarray
    num_samples: int
    settings: SamplingSettings
    limit: int
    decode: Callable[[list[int]], str] | None = None
    topk: int = 0
    future: Future[list[Sample]] = field(default_factory=Future)
    """Left pending until the samples are done, so that it can be cancelled at any time."""

    def __post_init__(self) -> None:
        self.rows = [SampleRow(self, index) for index in range(self.num_samples)]
        self._running = self.num_samples

    def row_ended(self) -> None:
        """Counts a sample that is done; the last one completes the future."""
        self._running -= 1
        if self._running:
            return
        # Request and rows hold each other: left so, the sampler and all that is kept for it would
        # live until the garbage collector comes by.
        samples, self.rows = [row.sample for row in self.rows], []
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(samples)

    def fail(self, error: Exception) -> None:
        """Raises ``error`` for whoever waits."""
        self.rows = []
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class SampleRow:
    """One sample on its way: what was drawn so far, and its own random numbers."""

    def __init__(self, request: SampleRequest, index: int) -> None:
        self.request = request
        self.sample = Sample()
        seed = request.settings.seed
        self._rng = np.random.default_rng(None if seed is None else [seed, index])

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token."""
        return self._rng.random()

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and sample [T]."""
        return np.concatenate([self.request.prompt, self.sample.tokens]).astype(np.int64)

    @property
    def length(self) -> int:
        """Tokens of prompt and sample."""
        return len(self.request.prompt) + len(self.sample.tokens)

    def add(self, token: int, logprob: float, top: tuple[np.ndarray, np.ndarray] | None) -> bool:
        """Appends a drawn token; returns whether it was the last."""
        sample, settings = self.sample, self.request.settings
        sample.tokens.append(token)
        sample.logprobs.append(logprob)
        if top is not None:
            sample.topk.append(top)
        if token in settings.stop_tokens or (settings.stop_strings and self._string_ends()):
            sample.stop_reason = "stop"
            return True
        return len(sample.tokens) >= self.request.limit

    def _string_ends(self) -> bool:
        """Whether a stop string stands in the text, wherever its tokens are cut."""
        strings, decode = self.request.settings.stop_strings, self.request.decode
        if decode is None:
            return False
        # It ends somewhere in the newest token, so a tail that is longer than any of them is
        # enough. A character has at most four bytes, a token at least one.
        longest = max(len(text) for text in strings)
        tail = decode(self.sample.tokens[-(4 * longest + 8) :])
        return any(text in tail for text in strings)
