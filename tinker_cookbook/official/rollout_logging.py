"""Files of rollout summaries for user code (``rl.rollout_logging``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.rl.report.rollout_logging import (
    RolloutSummaryGroup,
    serialize_rollout_summaries_from_groups,
)
from tinker_cookbook.rl.types import TrajectoryGroup


def rollout_summaries_jsonl_path(iteration_dir: Path, base_name: str) -> Path:
    """Returns ``iteration_dir/BASE_NAME_rollout_summaries.jsonl``."""
    return iteration_dir / f"{base_name}_rollout_summaries.jsonl"


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
