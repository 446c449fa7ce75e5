"""What algorithms ask for text: tokens to tokens, or messages to a message.

Rollouts, evaluators and environments take a ``TokenCompleter`` or a ``MessageCompleter``, so that
a test, a person at the keyboard or another model can stand in for the sampling client.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends.protocols import SamplingClient
    from tinker_cookbook.renderers import Message, Renderer
else:
    tinker = lazy_module("tinker")

StopCondition: TypeAlias = list[str] | list[int]
"""Stop strings, or token ids that end a sample."""


@dataclass
class TokensWithLogprobs:
    """One sampled continuation.

    Attributes:
        tokens: Sampled ids, the stop token included.
        maybe_logprobs: Their log-probabilities under the policy that sampled them, in nats, one
            each; ``None`` where the source has none (a person, an API).
        stop_reason: ``"stop"`` when a stop condition ended it, ``"length"`` when it was cut off.
        sequence_id: The backend's name for this sequence, where it gives one.
        prompt_cache_hit_tokens: Prompt tokens that were not computed anew.
    """

    tokens: list[int]
    maybe_logprobs: list[float] | None
    stop_reason: str = "stop"
    sequence_id: str | None = None
    prompt_cache_hit_tokens: int = 0

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities.

        Raises:
            DataValidationError: There are none.
        """
        if self.maybe_logprobs is None:
            raise DataValidationError(
                "this completion has no log-probabilities, which training on it needs; sample with "
                "a completer that returns them, such as TinkerTokenCompleter"
            )
        return self.maybe_logprobs


class TokenCompleter:
    """Continues a sequence of tokens. A subclass defines ``__call__``."""

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        """Returns one continuation of ``model_input``, ended by ``stop`` or a length limit.

        Args:
            model_input: The prompt.
            stop: What ends the continuation.
            max_tokens: Most tokens of this one; a limit of the completer's own holds as well. An
                implementation may leave it out of its signature: rollouts then cut what is longer.
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
        """Returns several continuations; override where one request can ask for all of them."""
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return list(
            await asyncio.gather(
                *(self.derived(i)(model_input, stop, **limit) for i in range(num_samples))
            )
        )

    def derived(self, *path: int) -> TokenCompleter:
        """This completer with random numbers of its own, which depend on ``path`` alone.

        One without a seed returns itself.
        """
        return self


class MessageCompleter:
    """Answers a conversation. A subclass defines ``__call__``."""

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns the assistant's next message."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


@dataclass
class TinkerTokenCompleter(TokenCompleter):
    """Samples tokens from a sampling client.

    Attributes:
        sampling_client: Of any backend; it stands for one fixed version of the weights.
        max_tokens: Most tokens to sample.
        temperature: Of the softmax; 0 is greedy.
        context_window: Most tokens of prompt and sample together. ``max_tokens`` shrinks to what
            is left of it.
        top_p: Draw among the most probable tokens that hold this much; 1 is all.
        top_k: Draw among this many of the most probable tokens; -1 is all.
        seed: Makes samples repeatable: they depend on it and on the call's place (``derived``).
    """

    sampling_client: SamplingClient
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_sampling(self.max_tokens, self.temperature)

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        """Returns one sample of at most ``max_tokens``, the completer's own limit or this one,
        whichever is lower.

        Raises:
            DataValidationError: The prompt leaves no room in ``context_window``.
        """
        # A subclass may override sample_many without max_tokens, which is then only passed if set.
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
        """Returns ``num_samples`` samples of one request, for which the prompt is run once."""
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        params = tinker.SamplingParams(
            stop=stop,
            max_tokens=self._room(model_input.length, limit),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )
        response = await self.sampling_client.sample(
            prompt=model_input, num_samples=num_samples, sampling_params=params
        )
        return [
            TokensWithLogprobs(
                tokens=list(sequence.tokens),
                maybe_logprobs=sequence.logprobs,
                stop_reason=sequence.stop_reason,
                sequence_id=sequence.sequence_id,
                prompt_cache_hit_tokens=response.prompt_cache_hit_tokens,
            )
            for sequence in response.sequences
        ]

    def derived(self, *path: int) -> TinkerTokenCompleter:
        """This completer with a seed made of its own and ``path``."""
        if self.seed is None:
            return self
        import numpy as np  # not at the top: it would slow every start

        words = np.random.SeedSequence([self.seed, *path]).generate_state(1)
        return replace(self, seed=int(words[0]) >> 1)

    def _room(self, prompt_length: int, limit: int) -> int:
        if self.context_window is None:
            return limit
        room = self.context_window - prompt_length
        if room < 1:
            raise DataValidationError(
                f"the prompt has {prompt_length} tokens, which fills or exceeds context window "
                f"{self.context_window} and leaves no room to sample; shorten the prompt or raise "
                "context_window"
            )
        return min(limit, room)


@dataclass
class TinkerMessageCompleter(MessageCompleter):
    """Answers conversations with a sampling client and a renderer.

    Attributes:
        sampling_client: Of any backend.
        renderer: Turns messages into the prompt and the sampled tokens into a message; it must be
            the one the model was trained with.
        max_tokens: Most tokens to sample.
        stop_condition: Instead of the renderer's own stop sequences.
        temperature: Of the softmax; 0 is greedy.
    """

    sampling_client: SamplingClient
    renderer: Renderer
    max_tokens: int
    stop_condition: StopCondition | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_sampling(self.max_tokens, self.temperature)

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns the parsed answer, also where it was cut off or does not parse cleanly."""
        stop = self.stop_condition
        complete = TinkerTokenCompleter(self.sampling_client, self.max_tokens, self.temperature)
        completion = await complete(
            self.renderer.build_generation_prompt(messages),
            self.renderer.get_stop_sequences() if stop is None else stop,
        )
        message, _ = self.renderer.parse_response(completion.tokens)
        return message


def _check_sampling(max_tokens: int, temperature: float) -> None:
    if max_tokens < 1:
        raise ConfigurationError(f"max_tokens={max_tokens}; expected at least 1")
    if not 0 <= temperature < float("inf"):
        raise ConfigurationError(f"temperature={temperature}; expected a finite number >= 0")
