"""How the rollouts of a run are configured: one object, and two presets."""

from __future__ import annotations

from typing import Literal, TypeAlias

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.rollouts.strategy import FailFast, MinViableGroup, RolloutStrategy

ToolExecution: TypeAlias = Literal["sequential", "parallel", "concurrent_safe"]
"""How the tool calls of one message run: one after the other, or all at once.
``concurrent_safe`` (tools say whether they may run at once) is not available yet."""

_NO_POLICY = TerminationRewardPolicy()


@chz.chz
class RolloutConfig:
    """How rollouts are run.

    ``parse_errors=None`` leaves malformed answers to the environment's own rules,
    ``termination=None`` leaves rewards as they are.
    """

    limits: RolloutLimits = chz.field(default_factory=RolloutLimits, doc="Limits of a rollout")
    parse_errors: ParseErrorPolicy | None = chz.field(
        default=None, doc="Malformed answers; None leaves them to the environment"
    )
    termination: TerminationRewardPolicy | None = chz.field(
        default=None, doc="Rewards of rollouts that hit a limit; None leaves them as they are"
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

    @property
    def termination_policy(self) -> TerminationRewardPolicy:
        """``termination``, or a policy that changes nothing."""
        return _NO_POLICY if self.termination is None else self.termination


def simple() -> RolloutConfig:
    """No limits: the environment alone decides when a rollout ends."""
    return RolloutConfig()


def agentic() -> RolloutConfig:
    """For environments with tools: limits, two retries of a malformed answer, tools in order.

    Rewards of rollouts that hit a limit are clamped to at most 0, and a grader has 15 minutes.
    """
    return RolloutConfig(
        limits=RolloutLimits(max_turns=10, max_trajectory_tokens=65_536, max_tool_calls=30),
        parse_errors=ParseErrorPolicy(max_consecutive=2),
        termination=TerminationRewardPolicy(
            zero_reward_on_limit=True, skip_grading_on_timeout=True, grader_timeout_seconds=900
        ),
        # Tools that share state, such as a file system, need the order of the calls.
        tool_execution="sequential",
    )


def default_rollout_config_for_model(model_name: str) -> RolloutConfig:
    """:func:`agentic` for models made for tools (Inkling), else :func:`simple`."""
    return agentic() if _is_agentic(model_name) else simple()


def default_rollout_strategy_for_model(model_name: str) -> RolloutStrategy:
    """``MinViableGroup`` for models made for tools, whose backends fail now and then; else
    ``FailFast``."""
    return MinViableGroup() if _is_agentic(model_name) else FailFast()


def _is_agentic(model_name: str) -> bool:
    # Variants with a longer context have a suffix behind a colon.
    return model_name.partition(":")[0].startswith("thinkingmachines/Inkling")
