"""A bound on the tokens of one answer, for any policy."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import StopReason

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.rl.rollout_config import RolloutLimits


@dataclass(frozen=True)
class TurnBudget:
    """Most tokens that the next answer may have (``None``: any number), and the limit that ends
    the episode once they are used up (``None``: none does)."""

    tokens: int | None
    reason: StopReason | None = None

    @property
    def exhausted(self) -> bool:
        """Whether not one token is left."""
        return self.tokens is not None and self.tokens < 1


def turn_budget(limits: RolloutLimits, prompt_tokens: int, sampled_tokens: int) -> TurnBudget:
    """The tightest of the token limits, for a prompt of so many tokens and after so many sampled
    ones."""
    candidates: list[TurnBudget] = []
    if limits.max_trajectory_tokens is not None:
        left = limits.max_trajectory_tokens - prompt_tokens
        candidates.append(TurnBudget(left, StopReason.MAX_TOKENS))
    if limits.max_sampled_tokens is not None:
        left = limits.max_sampled_tokens - sampled_tokens
        candidates.append(TurnBudget(left, StopReason.MAX_SAMPLED_TOKENS))
    if limits.max_turn_tokens is not None:
        candidates.append(TurnBudget(limits.max_turn_tokens))
    return min(candidates, key=lambda budget: budget.tokens or 0, default=TurnBudget(None))


def limit_tokens(policy: TokenCompleter, max_tokens: int | None) -> TokenCompleter:
    """The policy with at most ``max_tokens`` an answer.

    One with a ``max_tokens`` of its own is asked for fewer. Of any other the answers are cut off
    after they came, which costs more and draws from the same distribution.
    """
    if max_tokens is None:
        return policy
    own = getattr(policy, "max_tokens", None)
    if isinstance(own, int) and is_dataclass(policy):
        return policy if own <= max_tokens else replace(cast(Any, policy), max_tokens=max_tokens)
    return _Truncated(policy, max_tokens)


@dataclass(frozen=True)
class _Truncated(TokenCompleter):
    inner: TokenCompleter
    max_tokens: int

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition
    ) -> TokensWithLogprobs:
        return self._cut(await self.inner(model_input, stop))

    async def sample_many(
        self, model_input: tinker.ModelInput, stop: StopCondition, num_samples: int
    ) -> list[TokensWithLogprobs]:
        return [self._cut(s) for s in await self.inner.sample_many(model_input, stop, num_samples)]

    def derived(self, *path: int) -> TokenCompleter:
        return _Truncated(self.inner.derived(*path), self.max_tokens)

    def _cut(self, sample: TokensWithLogprobs) -> TokensWithLogprobs:
        n = self.max_tokens
        if len(sample.tokens) <= n:
            return sample
        logprobs = None if sample.maybe_logprobs is None else sample.maybe_logprobs[:n]
        return replace(
            sample, tokens=sample.tokens[:n], maybe_logprobs=logprobs, stop_reason="length"
        )
