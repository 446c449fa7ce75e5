"""Queue of an asynchronous run, saved with its checkpoints.

``async_queue_NNNNNN.jsonl`` in the run's folder belongs to the checkpoint after step N: the first
line has the position in the data, each further line one finished group that was not trained yet.
JSON is readable for people and other versions, and loading it runs no code. The file is complete
before the checkpoint is listed, so each listed checkpoint has its queue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.checkpoint_utils import load_checkpoints_file
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import CheckpointError, TrainingError
from tinker_cookbook.rl.loop.sources import RolloutGroup
from tinker_cookbook.rl.types import (
    RolloutError,
    Trajectory,
    TrajectoryGroup,
    Transition,
    as_stop_reason,
)
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.run_folder.jsonl import NONFINITE_KEY, encode_row, read_rows
from tinker_cookbook.utils.run_folder.paths import write_atomically

if TYPE_CHECKING:
    import tinker
else:
    tinker = lazy_module("tinker")

_VERSION = 1


@dataclass
class QueueState:
    """State from which an asynchronous run continues."""

    position: tuple[int, int]
    """(batch, index) of the first group that was not started; batches count over epochs."""
    in_flight: Sequence[tuple[int, int]]
    """Earlier groups that were started but not finished; they run again."""
    queue: Sequence[RolloutGroup]
    """Finished groups that were not trained yet."""


def write_queue(log_path: Path, step: int, state: QueueState) -> None:
    """Writes the state after ``step`` updates, and removes files of deleted checkpoints."""
    head = {
        "version": _VERSION,
        "step": step,
        "position": list(state.position),
        "in_flight": sorted(map(list, state.in_flight)),
        "num_groups": len(state.queue),
    }
    content = b"".join(encode_row(row) for row in [head, *map(group_to_row, state.queue)])
    path = _path(log_path, step)
    try:
        write_atomically(path, content)
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror or error}; free some space there, then "
            "continue the run from its last checkpoint"
        ) from error
    listed = {_path(log_path, record.batch or 0) for record in load_checkpoints_file(log_path)}
    for old in log_path.glob("async_queue_*.jsonl"):
        if old != path and old not in listed:
            old.unlink(missing_ok=True)


def read_queue(log_path: Path, step: int) -> QueueState | None:
    """Returns the state after ``step`` updates, or ``None`` if none was written.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = _path(log_path, step)
    if not path.exists():
        return None
    try:
        head, *rest = read_rows(path)
        if head["version"] != _VERSION or head["step"] != step or head["num_groups"] != len(rest):
            raise ValueError(f"its first line is {head} and {len(rest)} groups follow")
        batch, index = head["position"]
        begun = [(int(place[0]), int(place[1])) for place in head["in_flight"]]
        return QueueState((batch, index), begun, [group_from_row(row) for row in rest])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path}: it is damaged or of another version ({type(error).__name__}: {error}), "
            "expected the queue of groups saved with the checkpoint after step "
            f"{step}; remove the file to go on without them, with the data of batch {step}"
        ) from error


def _path(log_path: Path, step: int) -> Path:
    return log_path / f"async_queue_{step:06d}.jsonl"


def group_to_row(rollouts: RolloutGroup) -> dict[str, Any]:
    """Returns a finished group as JSON, without the log of its environments."""
    group = rollouts.group
    return {
        "batch": rollouts.batch,
        "index": rollouts.index,
        "tags": list(rollouts.tags),
        "seconds": rollouts.seconds,
        "sampling_client_step": group.sampling_client_step,
        "final_rewards": list(group.final_rewards_G),
        "metrics": [_numbers_out(metrics) for metrics in group.metrics_G],
        "rollout_errors": [str(error) for error in group.rollout_errors],
        "trajectories": [_trajectory_out(trajectory) for trajectory in group.trajectories_G],
    }


def group_from_row(row: Mapping[str, Any]) -> RolloutGroup:
    """Returns the group that :func:`group_to_row` wrote."""
    group = TrajectoryGroup(
        trajectories_G=[_trajectory_in(trajectory) for trajectory in row["trajectories"]],
        final_rewards_G=list(row["final_rewards"]),
        metrics_G=[_numbers_in(metrics) for metrics in row["metrics"]],
        rollout_errors=[RolloutError.parse(line) for line in row["rollout_errors"]],
        sampling_client_step=row["sampling_client_step"],
    )
    return RolloutGroup(
        row["batch"], row["index"], result=group, tags=list(row["tags"]), seconds=row["seconds"]
    )


# Fields are copied by name; only those that JSON cannot hold are converted.


def _trajectory_out(trajectory: Trajectory) -> dict[str, Any]:
    turns = [
        {
            **_fields_out(turn),
            "ob": _input_out(turn.ob),
            "ac": asdict(turn.ac),
            "teacher_ob": None if turn.teacher_ob is None else _input_out(turn.teacher_ob),
        }
        for turn in trajectory.transitions
    ]
    final_ob = _input_out(trajectory.final_ob)
    return {**_fields_out(trajectory), "transitions": turns, "final_ob": final_ob}


def _trajectory_in(row: Mapping[str, Any]) -> Trajectory:
    turns = [
        Transition(
            **_fields_in(turn)
            | {
                "ob": _input_in(turn["ob"]),
                "ac": TokensWithLogprobs(**turn["ac"]),
                # Files of earlier versions lack it.
                "teacher_ob": _input_in(turn["teacher_ob"]) if turn.get("teacher_ob") else None,
            }
        )
        for turn in row["transitions"]
    ]
    reason = None if row["stop_reason"] is None else as_stop_reason(row["stop_reason"])
    changed = {"transitions": turns, "final_ob": _input_in(row["final_ob"]), "stop_reason": reason}
    return Trajectory(**_fields_in(row) | changed)


def _fields_out(record: Trajectory | Transition) -> dict[str, Any]:
    metrics, logs = _numbers_out(record.metrics), _numbers_out(record.logs)
    return vars(record) | {"metrics": metrics, "logs": logs}


def _fields_in(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "metrics": _numbers_in(row["metrics"]), "logs": _numbers_in(row["logs"])}


def _input_out(model_input: tinker.ModelInput) -> Any:
    # Text without images, the usual case, is one list of token ids.
    chunks = model_input.chunks
    if all(hasattr(chunk, "tokens") for chunk in chunks):
        return [token for chunk in chunks for token in chunk.tokens]  # type: ignore[union-attr]
    return model_input.model_dump(mode="json")


def _input_in(data: Any) -> tinker.ModelInput:
    if isinstance(data, list):
        return tinker.ModelInput.from_ints(data) if data else tinker.ModelInput.empty()
    return tinker.ModelInput.model_validate(data)


def _numbers_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns NaN and infinity as ``{"nonfinite": "nan"}``, and other objects as their text."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            value = {NONFINITE_KEY: str(value)}
        elif not (isinstance(value, (str, int, float)) or value is None):
            value = str(value)
        out[str(key)] = value
    return out


def _numbers_in(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: float(value[NONFINITE_KEY]) if isinstance(value, dict) else value
        for key, value in values.items()
    }
