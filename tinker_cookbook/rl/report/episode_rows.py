"""Episodes as JSON rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.run.jsonl import json_value

SCHEMA_VERSION = 1


def episode_row(
    group: TrajectoryGroup,
    member: int,
    *,
    split: str,
    iteration: int,
    group_idx: int,
    tags: Sequence[str],
    sampling_client_step: int | None,
) -> dict[str, Any]:
    """Returns the row of one episode: its rewards, its metrics and its steps' metrics."""
    trajectory = group.trajectories_G[member]
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
        "group_idx": group_idx,
        "traj_idx": member,
        "tags": list(tags),
        "sampling_client_step": sampling_client_step,
        "total_reward": group.get_total_rewards()[member],
        "final_reward": group.final_rewards_G[member],
        "trajectory_metrics": group.metrics_G[member],
        "steps": steps,
        "final_ob_len": trajectory.final_ob.length,
    }
    # Metrics and logs of an environment may hold values without a JSON form.
    return json_value(row)
