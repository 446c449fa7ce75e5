"""Rollouts as JSON rows, one per episode, for user code that stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RolloutSummaryExportConfig:
    """Names of an export: ``split`` is ``train`` or ``eval/NAME``."""

    split: str
    iteration: int
    base_name: str
    sampling_client_step: int | None = None


@dataclass(frozen=True)
class RolloutSummaryGroup:
    """A group to export, with its tags."""

    trajectory_group: TrajectoryGroup
    tags: list[str]
    sampling_client_step: int | None = None


def serialize_rollout_summaries_from_groups(
    *, split: str, iteration: int, groups_P: Sequence[RolloutSummaryGroup]
) -> list[dict[str, Any]]:
    """Returns a row for each episode, with its rewards, its metrics and its steps' metrics."""
    rows: list[dict[str, Any]] = []
    for index, entry in enumerate(groups_P):
        group = entry.trajectory_group
        rewards_G = group.get_total_rewards()
        for member, trajectory in enumerate(group.trajectories_G):
            steps = [
                {
                    "step_idx": number,
                    "ob_len": turn.ob.length,
                    "ac_len": len(turn.ac.tokens),
                    "reward": turn.reward,
                    "episode_done": turn.episode_done,
                    "metrics": turn.metrics,
                    "logs": turn.logs,
                }
                for number, turn in enumerate(trajectory.transitions)
            ]
            row = {
                "schema_version": SCHEMA_VERSION,
                "split": split,
                "iteration": iteration,
                "group_idx": index,
                "traj_idx": member,
                "tags": list(entry.tags),
                "sampling_client_step": entry.sampling_client_step,
                "total_reward": rewards_G[member],
                "final_reward": group.final_rewards_G[member],
                "trajectory_metrics": group.metrics_G[member],
                "steps": steps,
                "final_ob_len": trajectory.final_ob.length,
            }
            # Metrics and logs of an environment may hold values without a JSON form.
            rows.append(json_value(row))
    return rows


def json_value(value: Any) -> Any:
    """Returns a value that JSON can hold; what has no JSON form becomes text, never an error."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    tolist = getattr(value, "tolist", None)  # arrays and scalars of numpy and torch
    try:
        return tolist() if callable(tolist) else str(value)
    except (RuntimeError, TypeError, ValueError):
        return str(value)
