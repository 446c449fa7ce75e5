"""Reinforcement learning: environments, rollouts, advantages, and the loop that trains on them.

Read it in this order: ``types`` (what an environment is), ``envs`` (environments to subclass),
``rollouts`` (run a policy in a group of environments), ``data_processing`` (trajectories to
training data), ``train`` and ``loop`` (the training loop), ``report`` (metrics and transcripts).
``run`` trains a model on a task of user code with one call.
"""

# Official names are lazy, so a type checker does not see them.
# pyright: reportUnsupportedDunderAll=false
from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.rl.dataset_utils import (
        EpochCycledRLDataset,
        cycle_permutation,
        epoch_batch_index,
    )
    from tinker_cookbook.rl.rollouts.strategy import FailFast, RetryOnFailure, RolloutStrategy
    from tinker_cookbook.rl.task import run, run_async
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
    "run",
    "run_async",
]

__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(__all__, "tinker_cookbook.rl.types")
    | {
        "EpochCycledRLDataset": "tinker_cookbook.rl.dataset_utils",
        "FailFast": "tinker_cookbook.rl.rollouts.strategy",
        "InterleavedRLDatasetBuilder": f"{__name__}.interleaved",
        "RetryOnFailure": "tinker_cookbook.rl.rollouts.strategy",
        "RolloutStrategy": "tinker_cookbook.rl.rollouts.strategy",
        "cycle_permutation": "tinker_cookbook.rl.dataset_utils",
        "epoch_batch_index": "tinker_cookbook.rl.dataset_utils",
        "run": "tinker_cookbook.rl.task",
        "run_async": "tinker_cookbook.rl.task",
    },
)
