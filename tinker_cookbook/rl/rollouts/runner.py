"""One episode, bounded and observed: :func:`run_rollout` and what goes with it."""

from __future__ import annotations

from tinker_cookbook.rl.rollouts.errors import SamplingTurnTimeoutError
from tinker_cookbook.rl.rollouts.group import run_rollout
from tinker_cookbook.rl.rollouts.hooks import (
    RolloutHooks,
    RolloutState,
    SupportsParseErrorPolicy,
    SupportsToolCallLimit,
)
from tinker_cookbook.rl.types import stop_reason_from_metrics

__all__ = [
    "TRUNCATION_METRIC_KEY",
    "RolloutHooks",
    "RolloutState",
    "SamplingTurnTimeoutError",
    "SupportsParseErrorPolicy",
    "SupportsToolCallLimit",
    "run_rollout",
    "stop_reason_from_metrics",
]

TRUNCATION_METRIC_KEY = "num_truncations_max_turn_tokens"
"""Metric of an episode: answers that were cut at ``RolloutLimits.max_turn_tokens``."""
