"""A bound on the tokens of one answer, for any policy."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import StopReason

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.rl.rollouts.limits import RolloutLimits


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


def turn_budget(
    limits: RolloutLimits, prompt_tokens: int, sampled_tokens: int, *, heed_exhausted: bool = True
) -> TurnBudget:
    """Returns the tightest of the token limits.

    Args:
        limits: Of the rollout.
        prompt_tokens: Tokens of the next prompt.
        sampled_tokens: Tokens sampled so far.
        heed_exhausted: Whether limits that are used up count; a hook may let a rollout go on.
    """
    candidates: list[TurnBudget] = []
    if limits.max_trajectory_tokens is not None:
        left = limits.max_trajectory_tokens - prompt_tokens
        candidates.append(TurnBudget(left, StopReason.MAX_TOKENS))
    if limits.max_sampled_tokens is not None:
        left = limits.max_sampled_tokens - sampled_tokens
        candidates.append(TurnBudget(left, StopReason.MAX_SAMPLED_TOKENS))
    if limits.max_turn_tokens is not None:
        candidates.append(TurnBudget(limits.max_turn_tokens))
    if not heed_exhausted:
        candidates = [budget for budget in candidates if not budget.exhausted]
    return min(candidates, key=lambda budget: budget.tokens or 0, default=TurnBudget(None))


def limit_tokens(policy: TokenCompleter, max_tokens: int | None) -> TokenCompleter:
    """The policy with at most ``max_tokens`` an answer.

    One whose methods take ``max_tokens`` is asked for no more. Of any other the answers are cut off
    after they came, which costs more and draws from the same distribution.
    """
    return policy if max_tokens is None else _Limited(policy, max_tokens)


@lru_cache(maxsize=256)
def _takes_max_tokens(policy_class: type[Any], method: str) -> bool:
    parameters = inspect.signature(getattr(policy_class, method)).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "max_tokens" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


@dataclass(frozen=True)
class _Limited(TokenCompleter):
    inner: TokenCompleter
    max_tokens: int

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        return self._cut(await self.inner(model_input, stop, **self._limit("__call__")))

    async def sample_many(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        num_samples: int,
        *,
        max_tokens: int | None = None,
    ) -> list[TokensWithLogprobs]:
        # The inherited method hands the limit on to ``__call__``, which may not take it.
        inherited = type(self.inner).sample_many is TokenCompleter.sample_many
        limit = self._limit("__call__" if inherited else "sample_many")
        samples = await self.inner.sample_many(model_input, stop, num_samples, **limit)
        return [self._cut(sample) for sample in samples]

    def derived(self, *path: int) -> TokenCompleter:
        return _Limited(self.inner.derived(*path), self.max_tokens)

    def _limit(self, method: str) -> dict[str, int]:
        takes = _takes_max_tokens(type(self.inner), method)
        return {"max_tokens": self.max_tokens} if takes else {}

    def _cut(self, sample: TokensWithLogprobs) -> TokensWithLogprobs:
        n = self.max_tokens
        if len(sample.tokens) <= n:
            return sample
        logprobs = None if sample.maybe_logprobs is None else sample.maybe_logprobs[:n]
        return replace(
            sample, tokens=sample.tokens[:n], maybe_logprobs=logprobs, stop_reason="length"
        )
