"""Reinforcement learning: environments, rollouts, advantages, and the loop that trains on them.

Read it in this order: ``types`` (what an environment is), ``problem_env`` and ``message_env``
(bases to subclass), ``rollouts`` (a policy plays an environment), ``data_processing``
(trajectories to training data), ``train`` (the loop).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.rl.dataset_utils import (
        EpochCycledRLDataset,
        cycle_permutation,
        epoch_batch_index,
    )
    from tinker_cookbook.rl.interleaved import InterleavedRLDatasetBuilder
    from tinker_cookbook.rl.rollout_strategy import FailFast, RetryOnFailure, RolloutStrategy
    from tinker_cookbook.rl.types import (
        Action,
        ActionExtra,
        Env,
        EnvGroupBuilder,
        Logs,
        Metrics,
        Observation,
        RLDataset,
        RLDatasetBuilder,
        RolloutError,
        StepResult,
        Trajectory,
        TrajectoryGroup,
        Transition,
    )

__all__ = [
    "Action",
    "ActionExtra",
    "Env",
    "EnvGroupBuilder",
    "EpochCycledRLDataset",
    "FailFast",
    "InterleavedRLDatasetBuilder",
    "Logs",
    "Metrics",
    "Observation",
    "RLDataset",
    "RLDatasetBuilder",
    "RetryOnFailure",
    "RolloutError",
    "RolloutStrategy",
    "StepResult",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
    "cycle_permutation",
    "epoch_batch_index",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "Action": "tinker_cookbook.rl.types",
        "ActionExtra": "tinker_cookbook.rl.types",
        "Env": "tinker_cookbook.rl.types",
        "EnvGroupBuilder": "tinker_cookbook.rl.types",
        "EpochCycledRLDataset": "tinker_cookbook.rl.dataset_utils",
        "FailFast": "tinker_cookbook.rl.rollout_strategy",
        "InterleavedRLDatasetBuilder": "tinker_cookbook.rl.interleaved",
        "Logs": "tinker_cookbook.rl.types",
        "Metrics": "tinker_cookbook.rl.types",
        "Observation": "tinker_cookbook.rl.types",
        "RLDataset": "tinker_cookbook.rl.types",
        "RLDatasetBuilder": "tinker_cookbook.rl.types",
        "RetryOnFailure": "tinker_cookbook.rl.rollout_strategy",
        "RolloutError": "tinker_cookbook.rl.types",
        "RolloutStrategy": "tinker_cookbook.rl.rollout_strategy",
        "StepResult": "tinker_cookbook.rl.types",
        "Trajectory": "tinker_cookbook.rl.types",
        "TrajectoryGroup": "tinker_cookbook.rl.types",
        "Transition": "tinker_cookbook.rl.types",
        "cycle_permutation": "tinker_cookbook.rl.dataset_utils",
        "epoch_batch_index": "tinker_cookbook.rl.dataset_utils",
    },
)
