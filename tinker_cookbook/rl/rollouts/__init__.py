"""Rollouts: a policy acts in the environments of a group until each episode ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.rl.rollouts.episode import do_single_rollout, run_rollout
    from tinker_cookbook.rl.rollouts.errors import RolloutFailedError, SamplingTurnTimeoutError
    from tinker_cookbook.rl.rollouts.group import (
        RolloutErrorCounter,
        do_group_rollout,
        do_group_rollout_and_filter_constant_reward,
        get_rollout_executor,
        set_rollout_executor,
    )
    from tinker_cookbook.rl.rollouts.hooks import RolloutHooks, RolloutState

__all__ = [
    "RolloutErrorCounter",
    "RolloutFailedError",
    "RolloutHooks",
    "RolloutState",
    "SamplingTurnTimeoutError",
    "do_group_rollout",
    "do_group_rollout_and_filter_constant_reward",
    "do_single_rollout",
    "get_rollout_executor",
    "run_rollout",
    "set_rollout_executor",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "RolloutErrorCounter": "tinker_cookbook.rl.rollouts.group",
        "RolloutFailedError": "tinker_cookbook.rl.rollouts.errors",
        "RolloutHooks": "tinker_cookbook.rl.rollouts.hooks",
        "RolloutState": "tinker_cookbook.rl.rollouts.hooks",
        "SamplingTurnTimeoutError": "tinker_cookbook.rl.rollouts.errors",
        "do_group_rollout": "tinker_cookbook.rl.rollouts.group",
        "do_group_rollout_and_filter_constant_reward": "tinker_cookbook.rl.rollouts.group",
        "do_single_rollout": "tinker_cookbook.rl.rollouts.episode",
        "get_rollout_executor": "tinker_cookbook.rl.rollouts.group",
        "run_rollout": "tinker_cookbook.rl.rollouts.episode",
        "set_rollout_executor": "tinker_cookbook.rl.rollouts.group",
    },
)
