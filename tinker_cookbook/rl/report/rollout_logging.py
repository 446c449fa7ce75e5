"""Rollouts as JSON rows, one per episode, for user code that stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.rl.types import TrajectoryGroup

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


def rollout_summaries_jsonl_path(iteration_dir: Path, base_name: str) -> Path:
    """Returns ``iteration_dir/BASE_NAME_rollout_summaries.jsonl``."""
    return iteration_dir / f"{base_name}_rollout_summaries.jsonl"


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


def serialize_rollout_summaries(
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> list[dict[str, Any]]:
    """As :func:`serialize_rollout_summaries_from_groups`, from lists with an entry per group."""
    groups = _paired(trajectory_groups_P, taglist_P, sampling_client_steps_P)
    return serialize_rollout_summaries_from_groups(
        split=split, iteration=iteration, groups_P=groups
    )


def write_rollout_summaries_jsonl_from_groups(
    path: str | Path, *, split: str, iteration: int, groups_P: Sequence[RolloutSummaryGroup]
) -> None:
    """Writes the rows to a file, and creates its folder."""
    rows = serialize_rollout_summaries_from_groups(
        split=split, iteration=iteration, groups_P=groups_P
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rollout_summaries_jsonl(
    path: str | Path,
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> None:
    """As :func:`write_rollout_summaries_jsonl_from_groups`, from lists with an entry per group."""
    groups = _paired(trajectory_groups_P, taglist_P, sampling_client_steps_P)
    write_rollout_summaries_jsonl_from_groups(
        path, split=split, iteration=iteration, groups_P=groups
    )


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


def _paired(
    groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    steps_P: Sequence[int | None] | None,
) -> list[RolloutSummaryGroup]:
    steps_P = steps_P or [None] * len(groups_P)
    return [
        RolloutSummaryGroup(group, tags, step)
        for group, tags, step in zip(groups_P, taglist_P, steps_P, strict=True)
    ]
