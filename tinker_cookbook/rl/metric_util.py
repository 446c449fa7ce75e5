"""Metrics of trajectories, and the evaluator that plays a test set for them."""

from __future__ import annotations

from tinker_cookbook.rl.test_set import RLTestSetEvaluator
from tinker_cookbook.rl.trajectory_metrics import (
    compute_rollout_error_metrics,
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
)

__all__ = [
    "RLTestSetEvaluator",
    "compute_rollout_error_metrics",
    "compute_sampling_client_metrics",
    "compute_trajectory_metrics",
]
