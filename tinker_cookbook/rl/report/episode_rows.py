"""Episodes as JSON rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.run.jsonl import encode_row

SCHEMA_VERSION = 1

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


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


def json_text_of(value: Mapping[str, Any] | list[Mapping[str, Any]]) -> str:
    """Returns JSON text; NaN and infinity as in ``metrics.jsonl``, see ``run.jsonl``."""
    try:
        # Much faster than the conversion, which few values need.
        text = _encode(value)
        text.encode()  # raises for a lone surrogate, which the conversion escapes
        return text
    except (TypeError, ValueError):
        if isinstance(value, list):
            return f"[{','.join(map(json_text_of, value))}]"
        return encode_row(json_value(value)).decode().rstrip()


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
