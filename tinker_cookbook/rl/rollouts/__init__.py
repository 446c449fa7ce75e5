"""Rollouts: a policy acts in the environments of a group until each episode ends."""

from tinker_cookbook.rl.rollouts.episode import do_single_rollout, run_rollout
from tinker_cookbook.rl.rollouts.errors import RolloutFailedError, SamplingTurnTimeoutError
from tinker_cookbook.rl.rollouts.executors import RayExecutor
from tinker_cookbook.rl.rollouts.group import (
    do_group_rollout,
    get_rollout_executor,
    set_rollout_executor,
)
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks, RolloutState
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

__all__ = [
    "RayExecutor",
    "RolloutFailedError",
    "RolloutHooks",
    "RolloutState",
    "SamplingTurnTimeoutError",
    "do_group_rollout",
    "do_single_rollout",
    "get_rollout_executor",
    "run_rollout",
    "set_rollout_executor",
]
