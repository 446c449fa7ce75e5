"""The token limit of the next response of an episode."""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.rl.rollouts.limits import RolloutLimits
from tinker_cookbook.rl.types import StopReason


@dataclass(frozen=True)
class TurnBudget:
    """Maximum tokens of the next response, and the stop reason once none are left."""

    tokens: int | None
    reason: StopReason | None = None

    @property
    def exhausted(self) -> bool:
        """Whether no token is left."""
        return self.tokens is not None and self.tokens < 1


def tightest_budget(
    limits: RolloutLimits,
    context_window: int | None,
    prompt_tokens: int,
    sampled_tokens: int,
    skip_exhausted: bool = False,
) -> TurnBudget:
    """Returns the tightest of the limits after ``sampled_tokens`` in all earlier turns.

    ``skip_exhausted`` ignores limits that are used up.
    """
    budgets: list[TurnBudget] = []
    # The backend refuses a prompt that fills the model's context.
    if context_window is not None:
        left = context_window - prompt_tokens
        budgets.append(TurnBudget(left, StopReason.CONTEXT_OVERFLOW))
    if limits.max_trajectory_tokens is not None:
        # The prompt already holds all earlier turns.
        left = limits.max_trajectory_tokens - prompt_tokens
        budgets.append(TurnBudget(left, StopReason.MAX_TOKENS))
    if limits.max_sampled_tokens is not None:
        left = limits.max_sampled_tokens - sampled_tokens
        budgets.append(TurnBudget(left, StopReason.MAX_SAMPLED_TOKENS))
    if limits.max_turn_tokens is not None:
        # This limit truncates a response but does not end the episode, so it has no reason.
        budgets.append(TurnBudget(limits.max_turn_tokens))
    if skip_exhausted:
        budgets = [budget for budget in budgets if not budget.exhausted]
    return min(budgets, key=lambda budget: budget.tokens or 0, default=TurnBudget(None))
