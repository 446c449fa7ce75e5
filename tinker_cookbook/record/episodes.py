"""Sampled episodes as rows of the record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.schema import IMAGE, turn_schema
from tinker_cookbook.rl.rollouts.conversation import messages_json
from tinker_cookbook.rl.types import (
    Observation,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tinker_cookbook.run.jsonl import json_text_of
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.logtree import Trace

if TYPE_CHECKING:
    import pyarrow as pa

    from tinker_cookbook.renderers import Message

Tokens = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TrainedDatum:
    """What training computed for a datum's targets [T], and the turns that it is made of.

    ``turns`` has the number of each turn, and the target at which its answer begins.
    """

    group: int
    member: int
    turns: Sequence[tuple[int, int]]
    advantages: Numbers
    trainer_logprobs: Numbers
    update_pass: int
    """Number of the ``forward_backward`` of the step."""
    optimizer_step: int
    """Number of the ``optim_step`` of the step that follows this pass."""
    reference_logprobs: Numbers | None = None
    """Of a teacher or a reference policy, if there is one."""


@dataclass
class RecordedGroup:
    """A group to record; its ``index`` is its place in the batch of the step.

    ``position`` is the batch of the training data, counted over all epochs, and the index in it.
    """

    index: int
    group: TrajectoryGroup
    tags: Sequence[str] = ()
    advantages_G: Sequence[float] | None = None
    log: Trace | None = None
    """What its environments logged, which is in the files of ``rl.report.transcripts``."""
    position: tuple[int | None, int | None] = (None, None)


def turn_table(
    groups: Sequence[RecordedGroup],
    data: Sequence[TrainedDatum] = (),
    images: ImageFiles | None = None,
) -> pa.Table:
    """Returns a row for each turn of the groups, and one without a turn for an empty episode.

    ``data`` are those of the update, in the order of submission. ``images`` stores the images.
    """
    files = images or ImageFiles()
    rows = [row for group in groups for row in group_rows(group, files)]
    places = {
        (datum.group, datum.member, turn): (number, start)
        for number, datum in enumerate(data)
        for turn, start in datum.turns
    }
    for row in rows:
        place = places.get((row["group"], row["member"], row.get("turn", -1)))
        if place is not None:
            number, start = place
            datum, answer = data[number], slice(start, start + len(row["answer"]))
            row["datum"] = number
            row["update_pass"], row["optimizer_step"] = datum.update_pass, datum.optimizer_step
            row["trainer_logprobs"] = datum.trainer_logprobs[answer]
            row["advantages"] = datum.advantages[answer]
            if datum.reference_logprobs is not None:
                row["reference_logprobs"] = datum.reference_logprobs[answer]
    return table_of(rows, turn_schema())


def table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Returns a table of the rows; a column that a row lacks is null there."""
    import pyarrow as pa

    columns = [_column([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    parts = [value for value in values if value is not None]
    if not parts:
        return pa.nulls(len(values), kind)
    if not pa.types.is_list(kind) or pa.types.is_struct(kind.value_type):
        return pa.array(values, kind)
    # Token arrays are joined by numpy, without a Python object for each token.
    dtype = kind.value_type.to_pandas_dtype()
    offsets = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
    missing = [value is None for value in values] if len(parts) < len(values) else None
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(np.concatenate(parts, dtype=dtype, casting="unsafe"), kind.value_type),
        mask=None if missing is None else pa.array(missing, pa.bool_()),
    )


def episode_of_answers(
    answers: Sequence[tuple[Observation, TokensWithLogprobs]], messages: Iterable[Message]
) -> Trajectory:
    """Returns a conversation as an episode without rewards.

    ``answers`` are prompts with what was sampled after them; ``messages`` include the answers.
    """
    last = len(answers) - 1
    cut = bool(answers) and answers[last][1].stop_reason == "length"
    return Trajectory(
        [Transition(ob, sampled, 0.0, i == last) for i, (ob, sampled) in enumerate(answers)],
        tinker.ModelInput.empty(),
        StopReason.MAX_TOKENS if cut else StopReason.COMPLETED,
        messages=messages_json(messages),
    )


def group_rows(recorded: RecordedGroup, images: ImageFiles) -> list[dict[str, Any]]:
    """Returns a row for each turn of a group, as a mapping of column names."""
    group, rows = recorded.group, []
    rewards_G, tags = group.get_total_rewards(), json.dumps(list(recorded.tags))
    for member, trajectory in enumerate(group.trajectories_G):
        episode = {
            "group": recorded.index,
            "member": member,
            "batch": recorded.position[0],
            "batch_group": recorded.position[1],
            "weights_step": group.sampling_client_step,
            "episode_reward": rewards_G[member],
            "episode_group_reward": group.final_rewards_G[member],
            "episode_advantage": recorded.advantages_G and recorded.advantages_G[member],
            "episode_stop_reason": str(trajectory.stop_reason or "completed"),
            "episode_metrics": json_text(group.metrics_G[member]),
            "episode_logs": json_text(trajectory.logs),
            "episode_messages": trajectory.messages or None,
            "episode_tool_calls": trajectory.tool_calls or None,
            "tags": tags,
        }
        turns = _turn_rows(trajectory, images) or [{}]
        # Episodes with equal first prompts have the same problem, also in other steps.
        first = turns[0].get("prompt")
        if first is not None:
            episode["problem"] = hashlib.sha256(first.tobytes()).hexdigest()[:16]
        rows += [episode | turn for turn in turns]
    return rows


def _turn_rows(trajectory: Trajectory, files: ImageFiles) -> list[dict[str, Any]]:
    rows = []
    turns = zip(trajectory.transitions, turn_tokens(trajectory, files), strict=True)
    for number, (transition, (prompt, images, kept, answer)) in enumerate(turns):
        logprobs = transition.ac.maybe_logprobs
        rows.append(
            {
                "turn": number,
                "seed": transition.ac.seed,
                "sample": transition.ac.sample,
                "prompt_kept": kept,
                "prompt": prompt[kept:],
                "images": [image for image in images if image["offset"] >= kept],
                "answer": answer,
                "logprobs": None if logprobs is None else np.asarray(logprobs, np.float32),
                "entropies": rounded_entropies(transition.ac.entropies),
                "stop_reason": transition.ac.stop_reason,
                "masked": transition.is_masked,
                "reward": transition.reward,
                "metrics": json_text(transition.metrics),
                "logs": json_text(transition.logs),
            }
        )
    return rows


def rounded_entropies(entropies: Sequence[float] | None) -> npt.NDArray[np.float16] | None:
    """Returns entropies with 6 significant bits, which is within 1.6%."""
    if entropies is None:
        return None
    # Rounded values repeat, so that a value takes 10 bits in the file.
    bits = np.asarray(entropies, np.float16).view(np.uint16)
    return ((bits + 16) & 0xFFE0).view(np.float16)


def turn_tokens(
    trajectory: Trajectory, files: ImageFiles
) -> Iterator[tuple[Tokens, list[dict[str, Any]], int, Tokens]]:
    """Yields the prompt [T] of each turn, its images, the number of its first tokens that the turn
    before has too, and the answer."""
    before, images_before = np.empty(0, np.int32), []
    for transition in trajectory.transitions:
        prompt, images = tokens_of(transition.ob, files)
        kept = common_prefix(before, prompt)
        # Two images of one size have equal tokens.
        for old, new in zip(images_before, images, strict=False):
            if old != new:
                kept = min(kept, new["offset"])
        answer = np.asarray(transition.ac.tokens, np.int32)
        yield prompt, images, kept, answer
        before, images_before = np.concatenate([prompt, answer]), images


def tokens_of(observation: Observation, files: ImageFiles) -> tuple[Tokens, list[dict[str, Any]]]:
    """Returns the tokens [T] of a prompt, ``IMAGE`` at those of images, and the images."""
    parts: list[Tokens] = []
    images: list[dict[str, Any]] = []
    offset = 0
    for chunk in observation.chunks:
        tokens = getattr(chunk, "tokens", None)
        if tokens is None:
            images.append(files.add(chunk, offset))
            parts.append(np.full(chunk.length, IMAGE, np.int32))
        else:
            parts.append(np.asarray(tokens, np.int32))
        offset += len(parts[-1])
    return np.concatenate(parts) if parts else np.empty(0, np.int32), images


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Returns the number of equal tokens at the start of both."""
    shorter = min(len(first), len(second))
    if not shorter:
        return 0
    differ = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differ[0]) if len(differ) else shorter


def json_text(value: Mapping[str, Any]) -> str | None:
    """Returns a mapping as JSON, ``None`` for an empty one; see ``json_text_of``."""
    return json_text_of(value) if value else None
