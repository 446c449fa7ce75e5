"""Limits of a rollout, the handling of parse errors, and rewards of rollouts that hit a limit.

All of it is off by default. ``rollout_presets.RolloutConfig`` holds the three together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
"""Stop reasons that mean: a configured limit ended the rollout, not the environment."""

DEFAULT_RETRY_MESSAGE_TEMPLATE = (
    "Your last message could not be read. Please write it again in the required format. "
    "Error: {details}"
)


@chz.chz
class RolloutLimits:
    """Bounds on one episode; ``None`` is no bound. A bound ends the episode, it is no error.

    Token bounds also shorten the request, so no token is sampled that would have to be dropped.
    """

    max_turns: int | None = chz.field(default=None, doc="Most answers")
    max_trajectory_tokens: int | None = chz.field(
        default=None, doc="Most tokens of a prompt and the answer to it together"
    )
    max_sampled_tokens: int | None = chz.field(
        default=None, doc="Most tokens sampled over all turns"
    )
    max_tool_calls: int | None = chz.field(default=None, doc="Most tool calls over all turns")
    max_turn_tokens: int | None = chz.field(
        default=None,
        doc="Most tokens of one answer; a longer one is cut off and stepped with",
    )
    rollout_timeout_seconds: float | None = chz.field(
        default=None, doc="Ends the episode after this time; the turns played so far are kept"
    )
    sampling_turn_timeout_seconds: float | None = chz.field(
        default=None, doc="Longest wait for one answer; beyond it the rollout has failed"
    )

    @chz.validate
    def _check(self) -> None:
        for name in (
            "max_turns",
            "max_trajectory_tokens",
            "max_sampled_tokens",
            "max_tool_calls",
            "max_turn_tokens",
        ):
            _at_least("limits." + name, getattr(self, name), 1)
        for name in ("rollout_timeout_seconds", "sampling_turn_timeout_seconds"):
            _positive("limits." + name, getattr(self, name))


@chz.chz
class ParseErrorPolicy:
    """What happens to an answer that cannot be read as a message.

    An episode of n malformed answers earns ``-n * penalty_per_error`` for them, and
    ``terminal_reward`` if they ended it.
    """

    max_consecutive: int = chz.field(
        default=0, doc="Malformed answers in a row that are asked again; one more ends the episode"
    )
    retry_message_template: str = chz.field(
        default=DEFAULT_RETRY_MESSAGE_TEMPLATE,
        doc="What the model is told; {details} says what was wrong",
    )
    penalty_per_error: float = chz.field(
        default=0.0, doc="Taken off the reward for each malformed answer"
    )
    terminal_reward: float = chz.field(
        default=0.0, doc="Reward of the answer that ends the episode as malformed"
    )
    mask_error_turns: bool = chz.field(default=False, doc="Do not train on malformed answers")

    @chz.validate
    def _check(self) -> None:
        _at_least("parse_errors.max_consecutive", self.max_consecutive, 0)
        _at_least("parse_errors.penalty_per_error", self.penalty_per_error, 0)
        if not math.isfinite(self.terminal_reward):
            raise ConfigurationError(
                f"parse_errors.terminal_reward: got {self.terminal_reward}, expected a number"
            )
        if not _takes_details(self.retry_message_template):
            raise ConfigurationError(
                f"parse_errors.retry_message_template: got {self.retry_message_template!r}, "
                "expected text whose only field is {details}; write {{ and }} for braces"
            )


@chz.chz
class TerminationRewardPolicy:
    """Rewards of rollouts that a limit ended.

    A rollout is graded as any other, and its total reward is then clamped to ``min(reward, 0)``:
    running into a limit never pays off, while the order among failures stays.
    """

    zero_reward_on_limit: bool = chz.field(
        default=False, doc="Clamp the total reward to at most 0 for each of limit_stop_reasons"
    )
    limit_stop_reasons: Sequence[str] = chz.field(
        default=DEFAULT_LIMIT_STOP_REASONS, doc="Stop reasons that count as running into a limit"
    )
    skip_grading_on_timeout: bool = chz.field(
        default=False,
        doc="Do not grade a rollout that timed out, where its reward would be clamped to 0",
    )
    grader_timeout_seconds: float | None = chz.field(
        default=None,
        doc="Longest wait for a grader; beyond it an episode's own gives 0, and a group's fails",
    )
    pass_all_messages_to_grader: bool = chz.field(
        default=False,
        doc="The grader also sees malformed answers, and messages added from outside",
    )

    def clamps(self, stop_reason: str | None) -> bool:
        """Whether a rollout that ended for this reason may not have a positive reward."""
        return self.zero_reward_on_limit and stop_reason in self.limit_stop_reasons

    def skips_grading(self, stop_reason: str | None) -> bool:
        """Whether grading could only confirm a reward of 0, and is left out."""
        timed_out = stop_reason == StopReason.ROLLOUT_TIMEOUT
        return timed_out and self.skip_grading_on_timeout and self.clamps(stop_reason)

    @chz.validate
    def _check(self) -> None:
        _positive("termination.grader_timeout_seconds", self.grader_timeout_seconds)


def _takes_details(template: str) -> bool:
    try:
        return template.format(details="") != template.format(details="x")
    except (KeyError, IndexError, ValueError):
        return False


def _at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not low <= value < math.inf:  # false for NaN as well
        raise ConfigurationError(f"{name}: got {value}, expected at least {low}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigurationError(
            f"{name}: got {value}, expected seconds above 0, or None for no bound"
        )
