"""Metrics of trajectories, and the evaluator that runs rollouts on a test set."""

from __future__ import annotations

from tinker_cookbook.rl.report.test_evaluator import RLTestSetEvaluator
from tinker_cookbook.rl.report.trajectory_metrics import (
    compute_rollout_error_metrics,
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
)
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

__all__ = [
    "RLTestSetEvaluator",
    "compute_rollout_error_metrics",
    "compute_sampling_client_metrics",
    "compute_trajectory_metrics",
    "dataset_to_env_group_builders",
]


def dataset_to_env_group_builders(dataset: RLDataset) -> list[EnvGroupBuilder]:
    """Returns the group builders of all batches of a dataset, in order."""
    return [builder for index in range(len(dataset)) for builder in dataset.get_batch(index)]
