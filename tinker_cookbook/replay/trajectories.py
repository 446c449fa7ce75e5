"""Prompts, trajectories and groups from the rows of a record."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import DataError
from tinker_cookbook.record.episodes import Tokens
from tinker_cookbook.record.images import image_file
from tinker_cookbook.record.read import Record, whole_prompts
from tinker_cookbook.record.schema import IMAGE
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition, as_stop_reason
from tinker_cookbook.utils.imports import tinker

Rows: TypeAlias = list[dict[str, Any]]


def turn_name(row: dict[str, Any]) -> str:
    """Returns the name of a turn in messages."""
    return f"group {row['group']}, episode {row['member']}, turn {row['turn']}"


def prompts_of(record: Record, turns: Rows) -> list[tinker.ModelInput]:
    """Returns the whole prompt of each turn of one episode, from its rows in order.

    Raises:
        DataError: An image is not stored in the record.
    """
    prompts, images = [], list[dict[str, Any]]()
    for turn, tokens in zip(turns, whole_prompts(turns), strict=True):
        # A row has the images of the new part of its prompt.
        images = [one for one in images if one["offset"] < turn["prompt_kept"]]
        images += turn["images"] or []
        prompts.append(model_input(record, tokens, images))
    return prompts


def model_input(
    record: Record, tokens: Tokens, images: Sequence[dict[str, Any]]
) -> tinker.ModelInput:
    """Returns recorded tokens [T] as a model input; raises ``DataError`` as ``prompts_of``."""
    chunks: list[Any] = []
    at = 0
    for image in images or ():
        if image["offset"] > at:
            chunks.append(tinker.EncodedTextChunk(tokens=tokens[at : image["offset"]].tolist()))
        path = image_file(record.log_path, image)
        if path is None:
            raise DataError(
                f"{record.log_path}: an image of the prompt is not in the record, only its digest "
                f"{image['sha256'][:12]}, so this cannot be computed again"
            )
        chunks.append(_image(path, image["length"]))
        at = image["offset"] + image["length"]
    if (tokens[at:] == IMAGE).any():
        raise DataError(f"{record.log_path}: a prompt has images that the record does not list")
    if at < len(tokens) or not chunks:
        chunks.append(tinker.EncodedTextChunk(tokens=tokens[at:].tolist()))
    return tinker.ModelInput(chunks=chunks)


@functools.lru_cache(maxsize=256)
def _image(path: Path, length: int) -> Any:
    kind: Any = path.suffix[1:]
    data = path.read_bytes()
    return tinker.types.ImageChunk(data=data, format=kind, expected_tokens=length)


def transitions_of(record: Record, turns: Rows) -> list[Transition]:
    """Returns the turns of one episode, from its rows in order."""
    return [
        Transition(
            ob=prompt,
            ac=TokensWithLogprobs(
                row["answer"],
                row["logprobs"],
                row["stop_reason"],
                # Losses that need the sampled sequence only tell the sequences apart.
                sequence_id=turn_name(row),
                seed=row["seed"],
                sample=row["sample"],
            ),
            reward=row["reward"],
            episode_done=row is turns[-1],
            metrics=json.loads(row["metrics"] or "{}"),
            logs=json.loads(row["logs"] or "{}"),
            masked=row["masked"],
        )
        for row, prompt in zip(turns, prompts_of(record, turns), strict=True)
    ]


def group_of(record: Record, rows: Rows) -> TrajectoryGroup:
    """Returns the group of episodes with these rows."""
    trajectories, firsts = [], list[dict[str, Any]]()
    for _, episode in groupby(rows, lambda row: row["member"]):
        turns = list(episode)
        first, has_turns = turns[0], turns[0]["turn"] is not None
        own = first["episode_reward"] - first["episode_group_reward"]
        trajectories.append(
            Trajectory(
                transitions_of(record, turns) if has_turns else [],
                tinker.ModelInput.empty(),
                as_stop_reason(first["episode_stop_reason"]),
                reward_without_turn=0.0 if has_turns else own,
                logs=json.loads(first["episode_logs"] or "{}"),
                messages=first["episode_messages"] or "",
                tool_calls=first["episode_tool_calls"] or "",
            )
        )
        firsts.append(first)
    return TrajectoryGroup(
        trajectories,
        [row["episode_group_reward"] for row in firsts],
        [json.loads(row["episode_metrics"] or "{}") for row in firsts],
        sampling_client_step=firsts[0]["weights_step"],
    )
