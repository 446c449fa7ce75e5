"""Settings of rollouts: limits, parse errors, rewards of truncated rollouts. All default to off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import StopReason

DEFAULT_LIMIT_STOP_REASONS: tuple[str, ...] = (
    StopReason.MAX_TOKENS,
    StopReason.MAX_SAMPLED_TOKENS,
    StopReason.MAX_TURNS,
    StopReason.MAX_TOOL_CALLS,
    StopReason.ROLLOUT_TIMEOUT,
)
"""Stop reasons of rollouts that a configured limit ended."""

# Part of the prompts of an episode: the words of the official cookbook, so that runs compare.
DEFAULT_RETRY_MESSAGE_TEMPLATE = "The previous message had a formatting issue.\nError: {details}"

ToolExecution: TypeAlias = Literal["sequential", "parallel", "concurrent_safe"]
"""Execution order of the tool calls of one message.
``concurrent_safe``, where each tool declares whether it may run concurrently, is not available."""


@dataclass(frozen=True)
class TurnBudget:
    """Maximum tokens of the next response, and the stop reason once none are left."""

    tokens: int | None
    reason: StopReason | None = None

    @property
    def exhausted(self) -> bool:
        """Whether no token is left."""
        return self.tokens is not None and self.tokens < 1


@chz.chz
class RolloutLimits:
    """Limits of one episode; ``None`` means no limit. Reaching a limit ends the episode.

    Only ``sampling_turn_timeout_seconds`` raises an error. The token limits also lower
    ``max_tokens`` of the sampling requests, so no token is sampled in vain.
    """

    max_turns: int | None = chz.field(default=None, doc="Maximum number of turns")
    max_trajectory_tokens: int | None = chz.field(
        default=None, doc="Maximum tokens of a prompt and its response together"
    )
    max_sampled_tokens: int | None = chz.field(
        default=None, doc="Maximum tokens sampled over all turns"
    )
    max_tool_calls: int | None = chz.field(
        default=None, doc="Maximum number of tool calls over all turns"
    )
    max_turn_tokens: int | None = chz.field(
        default=None,
        doc="Maximum tokens of one response; a longer one is truncated and passed to step",
    )
    rollout_timeout_seconds: float | None = chz.field(
        default=None, doc="Time after which the episode ends; finished turns are kept"
    )
    sampling_turn_timeout_seconds: float | None = chz.field(
        default=None, doc="Timeout of one sampling request; the rollout then fails"
    )

    @chz.validate
    def _check(self) -> None:
        for name in chz.chz_fields(type(self)):
            # Seconds may be a fraction; counts are at least 1.
            if name.endswith("_seconds"):
                _check_seconds("limits." + name, getattr(self, name))
            else:
                check_range("limits." + name, getattr(self, name), 1)

    def turn_budget(
        self,
        context_window: int | None,
        prompt_tokens: int,
        sampled_tokens: int,
        skip_exhausted: bool = False,
    ) -> TurnBudget:
        """Returns the tightest limit of the next response.

        ``sampled_tokens`` counts all earlier turns; ``skip_exhausted`` ignores limits that are used
        up.
        """
        limits = (
            # The backend refuses a prompt that fills the model's context.
            (context_window, prompt_tokens, StopReason.CONTEXT_OVERFLOW),
            # The prompt already holds all earlier turns.
            (self.max_trajectory_tokens, prompt_tokens, StopReason.MAX_TOKENS),
            (self.max_sampled_tokens, sampled_tokens, StopReason.MAX_SAMPLED_TOKENS),
            # This one truncates a response but does not end the episode, so it has no reason.
            (self.max_turn_tokens, 0, None),
        )
        budgets = [TurnBudget(most - used, why) for most, used, why in limits if most is not None]
        if skip_exhausted:
            budgets = [budget for budget in budgets if not budget.exhausted]
        return min(budgets, key=lambda budget: budget.tokens or 0, default=TurnBudget(None))


@chz.chz
class ParseErrorPolicy:
    """Handling of responses that cannot be parsed as a message.

    The reward of an episode includes ``-penalty_per_error`` for each parse error that is retried,
    and ``terminal_reward`` for the one that ends it.
    """

    max_consecutive: int = chz.field(
        default=0, doc="Consecutive parse errors that are retried; one more ends the episode"
    )
    retry_message_template: str = chz.field(
        default=DEFAULT_RETRY_MESSAGE_TEMPLATE,
        doc="Message to the model after a parse error; {details} is replaced by the error",
    )
    penalty_per_error: float = chz.field(
        default=0.0, doc="Amount subtracted from the reward for each parse error that is retried"
    )
    terminal_reward: float = chz.field(
        default=0.0, doc="Reward of the parse error that ends the episode"
    )
    mask_error_turns: bool = chz.field(default=False, doc="Do not train on turns with parse errors")

    @chz.validate
    def _check(self) -> None:
        check_range("parse_errors.max_consecutive", self.max_consecutive, 0)
        check_range("parse_errors.penalty_per_error", self.penalty_per_error, 0)
        try:
            self.retry_message_template.format(details="")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigurationError(
                f"parse_errors.retry_message_template: got {self.retry_message_template!r}, "
                "expected text whose only field is {details}; write {{ and }} for braces"
            ) from error


@chz.chz
class TerminationRewardPolicy:
    """Rewards of rollouts that a limit ended.

    With ``zero_reward_on_limit`` their total reward is clamped to ``min(reward, 0)`` after grading:
    reaching a limit is never rewarded, and negative rewards keep their order.
    """

    zero_reward_on_limit: bool = chz.field(
        default=False, doc="Clamp the total reward to at most 0 for each of limit_stop_reasons"
    )
    limit_stop_reasons: Sequence[str] = chz.field(
        default=DEFAULT_LIMIT_STOP_REASONS, doc="Stop reasons that count as reaching a limit"
    )
    skip_grading_on_timeout: bool = chz.field(
        default=False,
        doc="Skip grading of a rollout that timed out if its reward would be clamped to 0",
    )
    grader_timeout_seconds: float | None = chz.field(
        default=None,
        doc="Timeout of a grader: Env.grade then counts as 0, compute_group_rewards fails",
    )
    pass_all_messages_to_grader: bool = chz.field(
        default=False,
        doc="The grader also sees parse errors and messages that hooks added",
    )

    def clamps(self, stop_reason: str | None) -> bool:
        """Returns whether a rollout with this stop reason may not have a positive reward."""
        return self.zero_reward_on_limit and stop_reason in self.limit_stop_reasons

    def skips_grading(self, stop_reason: str | None) -> bool:
        """Returns whether a rollout with this stop reason gets reward 0 without being graded."""
        timed_out = stop_reason == StopReason.ROLLOUT_TIMEOUT
        return timed_out and self.skip_grading_on_timeout and self.clamps(stop_reason)

    @chz.validate
    def _check(self) -> None:
        _check_seconds("termination.grader_timeout_seconds", self.grader_timeout_seconds)


@chz.chz
class RolloutConfig:
    """Settings of rollouts."""

    limits: RolloutLimits = chz.field(default_factory=RolloutLimits, doc="Limits of a rollout")
    parse_errors: ParseErrorPolicy | None = chz.field(
        default=None, doc="Handling of parse errors; None: the environment's own"
    )
    termination: TerminationRewardPolicy | None = chz.field(
        default=None, doc="Rewards of rollouts that reach a limit; None: unchanged"
    )
    tool_execution: ToolExecution = chz.field(
        default="parallel", doc="Execution of the tool calls of one message: parallel or sequential"
    )

    @chz.validate
    def _check(self) -> None:
        if self.tool_execution not in ("parallel", "sequential"):
            raise ConfigurationError(
                f"tool_execution: got {self.tool_execution!r}, expected parallel or sequential"
            )

    @property
    def termination_policy(self) -> TerminationRewardPolicy:
        """``termination``, or a policy that changes no reward."""
        return TerminationRewardPolicy() if self.termination is None else self.termination


def check_range(name: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Raises ``ConfigurationError`` unless ``value`` is None or a finite number in the range."""
    if value is not None and not (low <= value <= high and math.isfinite(value)):
        end = f" and at most {high:g}" if math.isfinite(high) else ""
        raise ConfigurationError(f"{name}: got {value}, expected at least {low:g}{end}")


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigurationError(
            f"{name}: got {value}, expected seconds above 0, or None for no bound"
        )
