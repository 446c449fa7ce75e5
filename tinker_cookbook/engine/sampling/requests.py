"""Requests for samples and scores, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tinker_cookbook.engine.sampling.adjust_logits import LogitAdjuster
from tinker_cookbook.engine.sampling.options import SamplingSettings
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.examples import check_token_range
from tinker_cookbook.engine.vision.images import ImageInput, is_image, text_tokens
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

Prompt: TypeAlias = "Sequence[int] | np.ndarray"
"""Token ids [T], at least one."""


def settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Sets the result, or the error, of a future that is neither done nor cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


@dataclass
class Sample:
    """Result of one sample: token ids, log-probabilities, and stop reason."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = "length"
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    """Entropy of the softmax from which each token came, in nats, at temperature 1 and before all
    options; only if the request asks for it."""
    cached_prompt_tokens: int = 0
    """Number of prompt tokens found in the prefix cache or shared with another sample."""


@dataclass
class RequestStats:
    """Times of a sampling request, in seconds of ``time.monotonic``, and its tokens so far."""

    model: str
    owner: str | None
    prompt_tokens: int
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """When its first sample got a row of the batch; None: it never did, or another sampler ran."""
    first_token_at: float | None = None
    sampled_tokens: int = 0


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
    images: tuple[ImageInput, ...] = ()
    """Images of the prompt, which must exist as long as the request."""
    on_token: Callable[[int, Sample], None] | None = None
    """Called on the engine's thread with a sample's index and the sample whenever a token was
    added to it. It must return immediately and must not raise: all running samples wait for it."""
    entropy: bool = False
    """Whether the samples get their ``entropies``."""
    future: Future[list[Sample]] = field(default_factory=Future)
    """Pending until the samples are done, so that it can be cancelled at any time."""

    def __post_init__(self) -> None:
        self.rows = [SampledSequence(self, index) for index in range(self.num_samples)]
        self._running = self.num_samples
        sampler = self.sampler
        self.stats = RequestStats(sampler.base.name, sampler.owner, len(self.prompt))
        positions = sampler.base.positions(self.prompt)
        self.position_offset = (
            0 if positions is None else int(positions.max()) + 1 - len(self.prompt)
        )
        """Rotary position of a sampled token, less the number of tokens before it."""

    def row_ended(self) -> None:
        """Counts a finished sample; the last one completes the future."""
        self._running -= 1
        if self._running or self.future.done():
            return
        # Request and rows reference each other. Without clearing, the sampler and its cached
        # prefixes would stay in memory until the garbage collector runs.
        samples, self.rows = [row.sample for row in self.rows], []
        settle(self.future, samples)

    def fail(self, error: Exception) -> None:
        """Sets ``error`` on the future."""
        self.rows = []
        settle(self.future, error=error)


class SampledSequence:
    """Sequence that is being sampled: its tokens so far, and its random numbers."""

    def __init__(self, request: SampleRequest, index: int) -> None:
        self.request, self.index = request, index
        self.sample = Sample()
        seed = request.settings.seed
        # The index is part of the seed, so sample i depends neither on the batch nor on other
        # samples.
        self._rng = np.random.default_rng(None if seed is None else [seed, index])
        self._number, self._decides = 0.0, -1
        self.adjuster: LogitAdjuster | None = None
        if (settings := request.settings).change_logits:
            text = text_tokens(request.prompt)
            self.adjuster = LogitAdjuster(settings, settings.stop_tokens, text)
        self.ended = False
        """Whether the last token was added."""

    @property
    def failed(self) -> bool:
        """Whether its request was cancelled or has failed."""
        return self.request.future.done()

    def uniform(self) -> float:
        """Random number in [0, 1) for the next token; it changes when a token is added."""
        # One number per token: a step repeated after an error or preemption uses the same number.
        if self._decides != len(self.sample.tokens):
            self._number, self._decides = self._rng.random(), len(self.sample.tokens)
        return self._number

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of prompt and sample, [T]."""
        # An empty list would be float64, which cannot represent the ids of images.
        sampled = np.array(self.sample.tokens, dtype=np.int64)
        return np.concatenate([self.request.prompt, sampled])

    @property
    def length(self) -> int:
        """Length of prompt and sample in tokens."""
        return len(self.request.prompt) + len(self.sample.tokens)

    def add(
        self,
        token: int,
        logprob: float,
        top: tuple[np.ndarray, np.ndarray] | None,
        entropy: float | None = None,
    ) -> bool:
        """Appends a sampled token; returns whether it was the last."""
        sample, settings, stats = self.sample, self.request.settings, self.request.stats
        sample.tokens.append(token)
        stats.sampled_tokens += 1
        if stats.first_token_at is None:
            stats.first_token_at = time.monotonic()
        sample.logprobs.append(logprob)
        if top is not None:
            sample.topk.append(top)
        if entropy is not None:
            sample.entropies.append(entropy)
        if self.request.on_token is not None:
            self.request.on_token(self.index, sample)
        strings, decode = settings.stop_strings, self.request.decode
        stop = token in settings.stop_tokens
        if self.adjuster is not None:
            stop = self.adjuster.add(token) or stop
        if strings and decode is not None and not stop:
            # A stop string may cross token borders, but it ends in the newest token. So a tail that
            # is longer than any string is enough: a character has at most four bytes, a token at
            # least one.
            longest = max(len(text) for text in strings)
            # Stop strings within the first min_tokens tokens do not end a sample.
            first = max(settings.min_tokens, len(sample.tokens) - (4 * longest + 8))
            tail = decode(sample.tokens[first:])
            stop = any(text in tail for text in strings)
        if stop:
            sample.stop_reason = "stop"
        # A stop at the limit counts as "stop": the reason "length" means truncation.
        self.ended = stop or len(sample.tokens) >= self.request.limit
        return self.ended


@dataclass
class PromptScores:
    """Scores of a prompt's T tokens, fp32.

    ``logprobs`` [T] (NaN where not computed), ``topk_logprobs`` and ``topk_ids`` [T, k], and
    ``target_logprobs`` [T - 1, K] of given tokens at each position after the first.
    """

    logprobs: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    target_logprobs: np.ndarray | None = None


@dataclass(eq=False)
class ScoreRequest:
    """A checked request: scores of ``tokens`` [T] int64 from position ``first`` (>= 1) on.

    ``targets`` [T - 1, K] int64 are scored at all positions. ``sample`` is a request for
    one-token samples after the same tokens, computed in the same pass; its future is done before
    ``future``. ``future`` is pending until the scores are complete, so it can be cancelled at any
    time.
    """

    sampler: Sampler
    tokens: np.ndarray
    logprobs: bool
    topk: int
    targets: np.ndarray | None
    first: int
    sample: SampleRequest | None = None
    images: tuple[ImageInput, ...] = ()
    future: Future[PromptScores] = field(default_factory=Future)
    batch: list[ScoreRequest] = field(default_factory=list)
    """Requests that are scored in one batch, including this one; empty before planning."""

    @property
    def computed(self) -> np.ndarray:
        """Returns the tokens that the model has to compute."""
        # An image is computed as a whole: its tokens may see each other.
        whole = self.sample is not None or bool(is_image(self.tokens[-1]))
        return self.tokens if whole else self.tokens[:-1]

    def follow(self, operation: Future[None]) -> None:
        """Copies an error or cancellation of the worker's operation to the future."""
        # Scoring settles the future itself; this handles a closed engine and other errors.
        if operation.cancelled():
            self.future.cancel()
        elif (error := operation.exception()) is not None:
            settle(self.future, error=error)


def sample_request(
    sampler: Sampler,
    prompt: Prompt,
    num_samples: int,
    settings: SamplingSettings,
    *,
    decode: Callable[[list[int]], str] | None = None,
    topk_sample: int = 0,
    scored: bool = False,
    images: tuple[ImageInput, ...] = (),
) -> SampleRequest:
    """Returns a checked request for ``num_samples`` completions of ``prompt`` with its ``images``.

    ``scored``: the pass that scores the prompt samples one token, also if the prompt fills the
    context.
    """
    # Check before queueing, so that the error reaches the caller and not the running batch.
    tokens = _checked(sampler, prompt)
    if num_samples < 1:
        raise ConfigurationError(f"num_samples: got {num_samples}, expected at least 1")
    if settings.stop_strings and decode is None:
        raise ConfigurationError("stop: strings need a tokenizer; give decode")
    # The pass computes the state of the prompt's last token, so one token needs no position.
    room = 1 if scored else sampler.base.context_length - len(tokens)
    stops = np.fromiter(settings.stop_tokens, dtype=np.int64, count=len(settings.stop_tokens))
    for name, ids in (("logit_bias", settings.bias[0]), ("stop", stops)):
        if len(ids):
            check_token_range(name, ids, sampler.base.vocab_size)
    limit = room if settings.max_tokens is None else min(settings.max_tokens, room)
    if limit < 1:
        raise DataValidationError(
            f"prompt: {len(tokens)} tokens leave no room in the model's context of "
            f"{sampler.base.context_length}; shorten the prompt"
        )
    return SampleRequest(sampler, tokens, num_samples, settings, limit, decode, topk_sample, images)


def score_request(
    sampler: Sampler,
    prompt: Prompt,
    *,
    logprobs: bool = False,
    topk: int = 0,
    targets: np.ndarray | None = None,
    last_n: int | None = None,
    images: tuple[ImageInput, ...] = (),
) -> ScoreRequest:
    """Returns a checked request for scores of ``prompt``, each token given those before it.

    ``prompt`` has at least one token id; ``topk`` most probable tokens are returned at each
    position; ``targets`` [T - 1, K] are scored at each position after the first. With ``last_n``,
    ``logprobs`` and ``topk`` cover the last positions only.
    """
    tokens = _checked(sampler, prompt)
    if last_n is not None and not 1 <= last_n <= len(tokens) - 1:
        raise ConfigurationError(
            f"prompt_logprobs_last_n: got {last_n}, expected 1 to {len(tokens) - 1} "
            "(the prompt's length less one)"
        )
    if not 0 <= topk <= sampler.base.vocab_size:
        raise ConfigurationError(
            f"topk_prompt_logprobs: got {topk}, expected 0 to {sampler.base.vocab_size} "
            "(the vocabulary)"
        )
    if targets is not None:
        if targets.ndim != 2 or len(targets) != len(tokens) - 1:
            raise DataValidationError(
                f"target_prompt_logprobs: has shape {targets.shape}, expected "
                f"({len(tokens) - 1}, K): K tokens for each position after the first"
            )
        if targets.size:
            check_token_range("target_prompt_logprobs", targets, sampler.base.vocab_size)
    # The first token has no context, so it has no log-probability.
    first = 1 if last_n is None else len(tokens) - last_n
    return ScoreRequest(sampler, tokens, logprobs, topk, targets, first, images=images)


def _checked(sampler: Sampler, prompt: Prompt) -> np.ndarray:
    tokens = np.asarray(prompt, dtype=np.int64)
    if not len(tokens):
        raise DataValidationError("prompt: got no token, expected at least one")
    text = text_tokens(tokens)
    if len(text):
        check_token_range("prompt", text, sampler.base.vocab_size)
    sampler.base.check_images(tokens)
    if len(tokens) > sampler.base.context_length:
        raise DataValidationError(
            f"prompt: {len(tokens)} tokens, but the model's context is "
            f"{sampler.base.context_length}; shorten the prompt"
        )
    return tokens
