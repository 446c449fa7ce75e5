"""Files of rollout summaries for user code (``rl.rollout_logging``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.rl.report.episode_rows import episode_row
from tinker_cookbook.rl.types import TrajectoryGroup


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
    return [
        episode_row(
            entry.trajectory_group,
            member,
            split=split,
            iteration=iteration,
            group_idx=index,
            tags=entry.tags,
            sampling_client_step=entry.sampling_client_step,
        )
        for index, entry in enumerate(groups_P)
        for member in range(len(entry.trajectory_group.trajectories_G))
    ]


def serialize_rollout_summaries(
    *,
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> list[dict[str, Any]]:
    """As :func:`serialize_rollout_summaries_from_groups`, from lists with an entry per group."""
    lists = trajectory_groups_P, taglist_P, sampling_client_steps_P
    return serialize_rollout_summaries_from_groups(**_from_lists(split, iteration, *lists))


def _from_lists(
    split: str,
    iteration: int,
    trajectory_groups_P: Sequence[TrajectoryGroup],
    taglist_P: Sequence[list[str]],
    sampling_client_steps_P: Sequence[int | None] | None = None,
) -> dict[str, Any]:
    steps_P = sampling_client_steps_P or [None] * len(trajectory_groups_P)
    entries = zip(trajectory_groups_P, taglist_P, steps_P, strict=True)
    groups_P = [RolloutSummaryGroup(*one) for one in entries]
    return {"split": split, "iteration": iteration, "groups_P": groups_P}


def write_rollout_summaries_jsonl_from_groups(path: str | Path, **groups: Any) -> None:
    """Writes the rows of :func:`serialize_rollout_summaries_from_groups` to a file, and creates its
    folder."""
    target, rows = Path(path), serialize_rollout_summaries_from_groups(**groups)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rollout_summaries_jsonl(path: str | Path, **lists: Any) -> None:
    """As :func:`write_rollout_summaries_jsonl_from_groups`, from the arguments of
    :func:`serialize_rollout_summaries`."""
    write_rollout_summaries_jsonl_from_groups(path, **_from_lists(**lists))
