"""Preset rollout settings, and the defaults for a model."""

from __future__ import annotations

from tinker_cookbook.rl.rollouts.limits import (
    ParseErrorPolicy,
    RolloutConfig,
    RolloutLimits,
    TerminationRewardPolicy,
)
from tinker_cookbook.rl.rollouts.limits import ToolExecution as ToolExecution
from tinker_cookbook.rl.rollouts.strategy import FailFast, MinViableGroup, RolloutStrategy


def simple() -> RolloutConfig:
    """Returns settings without limits: only the environment ends a rollout."""
    return RolloutConfig()


def agentic() -> RolloutConfig:
    """Returns settings for environments with tools: limits, parse-error retries, ordered tools.

    The reward of a rollout that reaches a limit is clamped to at most 0; graders time out after 15
    minutes.
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
    """Returns :func:`agentic` for models made for tools (Inkling), otherwise :func:`simple`."""
    return agentic() if _is_agentic(model_name) else simple()


def default_rollout_strategy_for_model(model_name: str) -> RolloutStrategy:
    """Returns ``MinViableGroup`` for models made for tools, otherwise ``FailFast``.

    Tool backends fail now and then, which should not end a run.
    """
    return MinViableGroup() if _is_agentic(model_name) else FailFast()


def _is_agentic(model_name: str) -> bool:
    # Variants with a longer context have a suffix after a colon.
    return model_name.partition(":")[0].startswith("thinkingmachines/Inkling")
