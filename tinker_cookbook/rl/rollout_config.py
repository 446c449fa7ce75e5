"""What bounds an episode, what a malformed answer costs, and how an episode that was cut is paid.

All of it has a default that changes nothing; a run that needs none of it never meets it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import StopReason

ToolExecution = Literal["parallel", "sequential"]
"""Whether the tool calls of one message run at once or one after the other."""

LIMIT_STOP_REASONS: tuple[StopReason, ...] = (
    StopReason.MAX_TURNS,
    StopReason.MAX_TOKENS,
    StopReason.MAX_SAMPLED_TOKENS,
    StopReason.MAX_TOOL_CALLS,
    StopReason.CONTEXT_OVERFLOW,
)
"""Ends that a limit brought about. A timeout is not among them: it depends on the machine."""

DEFAULT_RETRY_MESSAGE = (
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
            "max_turn_tokens",
        ):
            _at_least("limits." + name, getattr(self, name), 1)
        _at_least("limits.max_tool_calls", self.max_tool_calls, 0)
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
        default=DEFAULT_RETRY_MESSAGE, doc="What the model is told; {details} says what was wrong"
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
        try:
            self.retry_message_template.format(details="")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigurationError(
                f"parse_errors.retry_message_template: got {self.retry_message_template!r}, "
                "expected text whose only field is {details}; write {{ and }} for braces"
            ) from error


@chz.chz
class TerminationRewardPolicy:
    """How an episode is paid that did not end by itself."""

    zero_reward_on_limit: bool = chz.field(
        default=False, doc="An episode that ends for one of limit_stop_reasons earns 0 in all"
    )
    limit_stop_reasons: Sequence[StopReason] = chz.field(
        default=LIMIT_STOP_REASONS, doc="Ends that count as running into a limit"
    )
    skip_grading_on_timeout: bool = chz.field(
        default=False, doc="Do not grade an episode that rollout_timeout_seconds ended"
    )
    grader_timeout_seconds: float | None = chz.field(
        default=None, doc="Longest wait for a grader; beyond it the answer earns 0 from it"
    )
    pass_all_messages_to_grader: bool = chz.field(
        default=False,
        doc="The grader also sees malformed answers, and messages put in from outside",
    )

    @chz.validate
    def _check(self) -> None:
        _positive("termination.grader_timeout_seconds", self.grader_timeout_seconds)


@chz.chz
class RolloutConfig:
    """How episodes are played.

    ``parse_errors=None`` leaves malformed answers to the environment's own rules.
    """

    limits: RolloutLimits = chz.field(default_factory=RolloutLimits, doc="Bounds on an episode")
    parse_errors: ParseErrorPolicy | None = chz.field(
        default=None, doc="Malformed answers; None leaves them to the environment"
    )
    termination: TerminationRewardPolicy = chz.field(
        default_factory=TerminationRewardPolicy, doc="Rewards of episodes that were cut"
    )
    tool_execution: ToolExecution = chz.field(
        default="parallel", doc="parallel or sequential: the tool calls of one message"
    )

    @chz.validate
    def _check(self) -> None:
        if self.tool_execution not in ("parallel", "sequential"):
            raise ConfigurationError(
                f"tool_execution: got {self.tool_execution!r}, expected parallel or sequential"
            )

    @classmethod
    def simple(cls) -> RolloutConfig:
        """No bounds: the environment alone decides when an episode ends."""
        return cls()

    @classmethod
    def agentic(cls) -> RolloutConfig:
        """For environments with tools: bounded, and with two tries to mend a malformed answer."""
        return cls(
            limits=RolloutLimits(max_turns=10, max_trajectory_tokens=65_536, max_tool_calls=30),
            parse_errors=ParseErrorPolicy(max_consecutive=2),
            termination=TerminationRewardPolicy(
                zero_reward_on_limit=True, grader_timeout_seconds=900.0
            ),
            tool_execution="sequential",
        )


def _at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not low <= value < math.inf:  # false for NaN as well
        raise ConfigurationError(f"{name}: got {value}, expected at least {low}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigurationError(
            f"{name}: got {value}, expected seconds above 0, or None for no bound"
        )
