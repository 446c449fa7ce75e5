"""Completers: policies that complete tokens or reply to messages.

Rollouts and evaluators use a completer, so a test, a person or another model can replace the
sampling client.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from tinker_cookbook.backends.protocols import SamplingClient
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.user_classes import accepts, overrides

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Message, Renderer

StopCondition: TypeAlias = list[str] | list[int]
"""Stop strings, or token ids that end a sample."""


def derived_seed(seed: int, *path: int) -> int:
    """Returns a seed below 2**31 that depends on ``seed`` and ``path``."""
    import numpy as np  # imported late, because it would slow down every start

    # SeedSequence mixes seed and path, so that neighbouring paths give independent seeds.
    words = np.random.SeedSequence([seed, *path]).generate_state(1)
    return int(words[0]) >> 1  # fits a signed 32-bit integer


@dataclass
class TokensWithLogprobs:
    """One sampled response.

    Attributes:
        tokens: Sampled token ids, including the stop token.
        maybe_logprobs: Log-probability of each token under the sampling policy, in nats; ``None``
            if the source has none, such as a person or an API.
        stop_reason: ``"stop"`` if a stop condition ended it, ``"length"`` if it was truncated.
        sequence_id: The backend's id of the sequence, if any.
        prompt_cache_hit_tokens: Prompt tokens read from the prefix cache.
        seed: Seed of the request, if it had one.
        sample: Number of the response in its request; with the seed, it repeats the response.
        entropies: Entropy of the distribution of each token in nats, if the backend tells it.
    """

    tokens: list[int]
    maybe_logprobs: list[float] | None
    stop_reason: str = "stop"
    sequence_id: str | None = None
    prompt_cache_hit_tokens: int = 0
    seed: int | None = None
    sample: int = 0
    entropies: list[float] | None = None

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities of the tokens; raises ``DataValidationError`` if there are none."""
        if self.maybe_logprobs is None:
            raise DataValidationError(
                "this completion has no log-probabilities, which training on it needs; sample with "
                "a completer that returns them, such as TinkerTokenCompleter"
            )
        return self.maybe_logprobs


class TokenCompleter:
    """Policy over tokens. A subclass defines ``__call__``."""

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Returns one response of at most ``max_tokens``, if given.

        A subclass may omit ``max_tokens`` from its signature; rollouts then truncate responses.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    async def sample_many(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        num_samples: int,
        *,
        max_tokens: int | None = None,
    ) -> list[TokensWithLogprobs]:
        """Returns several responses; override it if one request can return all of them."""
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        # Use a different seed per sample, or all samples of a seeded policy would be equal.
        calls = (self.derived(i)(model_input, stop, **limit) for i in range(num_samples))
        return list(await asyncio.gather(*calls))

    def derived(self, *path: int) -> TokenCompleter:
        """Returns this completer with a seed derived from its own and ``path``, if it has one."""
        return self


def limit_tokens(policy: TokenCompleter, max_tokens: int | None) -> TokenCompleter:
    """Returns the policy with at most ``max_tokens`` tokens per response; ``None``: no limit.

    If the policy's methods accept ``max_tokens``, the limit is passed with each request. Responses
    of other policies are truncated, which costs more but has the same distribution.
    """
    return policy if max_tokens is None else _Limited(policy, max_tokens)


@dataclass(frozen=True)
class _Limited(TokenCompleter):
    inner: TokenCompleter
    max_tokens: int

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return self._truncate(await self.inner(model_input, stop, **self._limit("__call__")))

    async def sample_many(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        num_samples: int,
        *,
        max_tokens: int | None = None,
    ) -> list[TokensWithLogprobs]:
        # Not the inherited method: it passes the limit to ``__call__``, which may not accept it.
        own = overrides(self.inner, TokenCompleter, "sample_many")
        limit = self._limit("sample_many" if own else "__call__")
        samples = await self.inner.sample_many(model_input, stop, num_samples, **limit)
        return [self._truncate(sample) for sample in samples]

    def derived(self, *path: int) -> TokenCompleter:
        return _Limited(self.inner.derived(*path), self.max_tokens)

    def _limit(self, method: str) -> dict[str, int]:
        accepted = accepts(type(self.inner), method, "max_tokens")
        return {"max_tokens": self.max_tokens} if accepted else {}

    def _truncate(self, sample: TokensWithLogprobs) -> TokensWithLogprobs:
        n = self.max_tokens
        # A short response keeps its stop reason.
        if len(sample.tokens) <= n:
            return sample
        # Truncate the log-probabilities too: training needs one per token.
        logprobs = None if sample.maybe_logprobs is None else sample.maybe_logprobs[:n]
        entropies = None if sample.entropies is None else sample.entropies[:n]
        return replace(
            sample,
            tokens=sample.tokens[:n],
            maybe_logprobs=logprobs,
            stop_reason="length",
            entropies=entropies,
        )


class MessageCompleter:
    """Policy over messages. A subclass defines ``__call__``."""

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns the assistant's next message."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


@dataclass
class TinkerTokenCompleter(TokenCompleter):
    """Policy that samples from a sampling client.

    Attributes:
        sampling_client: Client of any backend, for one fixed version of the weights.
        max_tokens: Maximum tokens of a response.
        temperature: Sampling temperature; 0 is greedy.
        context_window: Maximum tokens of prompt and response together; limits ``max_tokens``.
        top_p: Nucleus sampling: total probability of the candidate tokens; 1 is off.
        top_k: Number of candidate tokens; -1 is off.
        seed: Samples depend only on the seed and the path passed to ``derived``.
    """

    sampling_client: SamplingClient
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens={self.max_tokens}; expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(
                f"temperature={self.temperature}; expected a finite number >= 0"
            )

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Returns one response."""
        # Pass max_tokens only if set, because a subclass may override sample_many without it.
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return (await self.sample_many(model_input, stop, 1, **limit))[0]

    async def sample_many(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        num_samples: int,
        *,
        max_tokens: int | None = None,
    ) -> list[TokensWithLogprobs]:
        """Returns ``num_samples`` responses from one request with one prefill of the prompt.

        Raises ``DataValidationError`` if the prompt leaves no room in ``context_window``.
        """
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        # The backend refuses requests in which prompt and response exceed the model's context.
        if self.context_window is not None:
            room = self.context_window - model_input.length
            if room < 1:
                raise DataValidationError(
                    f"the prompt has {model_input.length} tokens, which fills or exceeds context "
                    f"window {self.context_window} and leaves no room to sample; shorten the "
                    "prompt or raise context_window"
                )
            limit = min(limit, room)
        params = tinker.SamplingParams(
            stop=stop,
            max_tokens=limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )
        response = await self.sampling_client.sample(
            prompt=model_input, num_samples=num_samples, sampling_params=params
        )
        # Only the bundled engine has them, and only for runs that record them.
        entropies = getattr(response, "entropies", None) or [None] * len(response.sequences)
        return [
            TokensWithLogprobs(
                tokens=list(sequence.tokens),
                maybe_logprobs=sequence.logprobs,
                stop_reason=sequence.stop_reason,
                sequence_id=sequence.sequence_id,
                prompt_cache_hit_tokens=response.prompt_cache_hit_tokens,
                seed=self.seed,
                sample=number,
                entropies=entropies[number],
            )
            for number, sequence in enumerate(response.sequences)
        ]

    def derived(self, *path: int) -> TinkerTokenCompleter:
        """Returns this completer with a seed derived from its own and ``path``."""
        return self if self.seed is None else replace(self, seed=derived_seed(self.seed, *path))


@dataclass
class TinkerMessageCompleter(MessageCompleter):
    """Policy over messages that uses a sampling client and a renderer.

    ``stop_condition`` replaces the renderer's stop sequences. ``context_window`` is as in
    ``TinkerTokenCompleter``.
    """

    sampling_client: SamplingClient
    renderer: Renderer
    max_tokens: int
    stop_condition: StopCondition | None = None
    temperature: float = 1.0
    context_window: int | None = None

    def __post_init__(self) -> None:
        self._policy()  # checks the settings

    def _policy(self) -> TinkerTokenCompleter:
        return TinkerTokenCompleter(
            self.sampling_client, self.max_tokens, self.temperature, self.context_window
        )

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns the parsed response, even if it was truncated or has parse errors."""
        stop = self.stop_condition
        completion = await self._policy()(
            self.renderer.build_generation_prompt(messages),
            self.renderer.get_stop_sequences() if stop is None else stop,
        )
        message, _ = self.renderer.parse_response(completion.tokens)
        return message
