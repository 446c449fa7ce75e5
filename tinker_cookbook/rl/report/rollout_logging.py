"""Rollouts as JSON rows, one for each episode, for user code that keeps them."""

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
    """What an export is called.

    Attributes:
        split: ``train``, or ``eval/NAME``.
        iteration: Number of the step.
        base_name: First part of the file's name.
        sampling_client_step: Updates in the weights that sampled; ``None`` where it is not known.
    """

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
    """Returns a row for each episode: rewards, metrics, and length, reward, metrics and logs of
    its steps.

    Args:
        split: As in ``RolloutSummaryExportConfig``.
        iteration: As there.
        groups_P: The groups, in the order of the batch.
    """
    return [
        _json_value(row)
        for index, group in enumerate(groups_P)
        for row in _rows(group, {"split": split, "iteration": iteration, "group_idx": index})
    ]


def serialize_rollout_summaries(
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> list[dict[str, Any]]:
    """As :func:`serialize_rollout_summaries_from_groups`, from lists of one entry for each group.

    Raises:
        ValueError: They differ in length.
    """
    steps = sampling_client_steps_P or [None] * len(trajectory_groups_P)
    groups = [
        RolloutSummaryGroup(group, tags, step)
        for group, tags, step in zip(trajectory_groups_P, taglist_P, steps, strict=True)
    ]
    return serialize_rollout_summaries_from_groups(
        split=split, iteration=iteration, groups_P=groups
    )


def write_rollout_summaries_jsonl_from_groups(
    path: Path, *, split: str, iteration: int, groups_P: Sequence[RolloutSummaryGroup]
) -> None:
    """Writes the rows to a file; its folder is made where it is missing."""
    _write(
        path,
        serialize_rollout_summaries_from_groups(
            split=split, iteration=iteration, groups_P=groups_P
        ),
    )


def write_rollout_summaries_jsonl(
    path: str | Path,
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> None:
    """As :func:`write_rollout_summaries_jsonl_from_groups`, from lists."""
    _write(
        path,
        serialize_rollout_summaries(
            split=split,
            iteration=iteration,
            trajectory_groups_P=trajectory_groups_P,
            taglist_P=taglist_P,
            sampling_client_steps_P=sampling_client_steps_P,
        ),
    )


def _rows(group: RolloutSummaryGroup, place: Mapping[str, Any]) -> list[dict[str, Any]]:
    played = group.trajectory_group
    rewards_G = played.get_total_rewards()
    return [
        {
            "schema_version": SCHEMA_VERSION,
            **place,
            "traj_idx": member,
            "tags": list(group.tags),
            "sampling_client_step": group.sampling_client_step,
            "total_reward": rewards_G[member],
            "final_reward": played.final_rewards_G[member],
            "trajectory_metrics": played.metrics_G[member],
            "steps": [
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
            ],
            "final_ob_len": trajectory.final_ob.length,
        }
        for member, trajectory in enumerate(played.trajectories_G)
    ]


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    # Numbers of numpy and torch have item(); what has none is written as text.
    item = getattr(value, "item", None)
    try:
        return item() if callable(item) else str(value)
    except (RuntimeError, TypeError, ValueError):
        return str(value)


def _write(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
