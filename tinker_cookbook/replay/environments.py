"""Replays recorded groups in their environments: with recorded answers, or sampled again."""

from __future__ import annotations

import asyncio
from itertools import groupby

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import DataError
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.record.episodes import RecordedGroup, group_rows
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.replay.compared import Compared, Result
from tinker_cookbook.replay.grading import (
    answers_of,
    builder_of,
    calls_of,
    different_grading,
    run_answers,
)
from tinker_cookbook.replay.trajectories import Rows, turn_name
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.loop.sources import SnapshotPolicy
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.place import RolloutPlace, at_place
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.tool_use.recording import replayed_calls


def groups_in(rows: Rows) -> list[Rows]:
    """Returns the rows of each group."""
    return [list(found) for _, found in groupby(rows, lambda row: row["group"])]


async def grade_again(
    config: Config, rows: Rows, split: str, *, live: bool, episode: int | None = None
) -> Result:
    """Runs the recorded answers of whole groups in their environments; compares the grading.

    ``live`` runs the tools; otherwise their results are the recorded ones. ``episode`` compares
    only this member of each group.
    """

    async def one(group: Rows) -> list[str]:
        builder = await recorded_builder(config, group, split)
        answers = answers_of(group)
        calls = None if live else calls_of(group)
        result = await run_answers(config, builder, answers, calls, size=len(answers))
        return different_grading(_of(group, episode), _rows(group, result))

    found = await asyncio.gather(*map(one, groups_in(rows)))
    lines = [line for of_group in found for line in of_group]
    episodes = len({(row["group"], row["member"]) for row in _of(rows, episode)})
    also = [] if lines else [f"prompts, rewards and metrics; episodes: {episodes}"]
    return Result(others=lines, also=also)


async def sample_live(
    config: Config,
    client: SamplingClient,
    version: int,
    rows: Rows,
    split: str,
    episode: int | None = None,
) -> Result:
    """Samples whole groups again, in their environments and with their tools."""

    async def one(group: Rows) -> Result:
        builder = await recorded_builder(config, group, split)
        again = _rows(group, await _sampled(config, client, version, builder, group[0], split))
        now = {(row["member"], row["turn"]): row for row in again if "turn" in row}
        compared = []
        for row in _of(group, episode):
            if row["turn"] is not None:
                found = now.get((row["member"], row["turn"]), {})
                tokens = _tokens(row), _tokens(found)
                compared.append(
                    Compared(turn_name(row), tokens, (_logprobs(row), _logprobs(found)))
                )
        return Result(compared, others=different_grading(_of(group, episode), again))

    results = await asyncio.gather(*map(one, groups_in(rows)))
    return Result(
        [one for result in results for one in result.compared],
        others=[line for result in results for line in result.others],
    )


def _of(rows: Rows, episode: int | None) -> Rows:
    return [row for row in rows if episode in (None, row["member"])]


async def recorded_builder(config: Config, rows: Rows, split: str) -> EnvGroupBuilder:
    """Returns the builder of a recorded group.

    Raises:
        DataError: The record does not tell where in the data it is.
        ConfigurationError: The data have no such group any more.
    """
    first = rows[0]
    if split == "train" and first.get("batch") is None:
        raise DataError("the record is of an earlier version: it does not tell a group's batch")
    index = first["batch_group"] if split == "train" else first["group"]
    return await builder_of(config, split, first.get("batch") or 0, index)


async def _sampled(
    config: Config,
    client: SamplingClient,
    version: int,
    builder: EnvGroupBuilder,
    first: dict[str, int],
    split: str,
) -> TrajectoryGroup:
    train = split == "train"
    position = (first["batch"], first["batch_group"]) if train else (first["group"],)
    policy = SnapshotPolicy(
        client,
        max_tokens=config.max_tokens,
        temperature=config.temperature if train else config.eval_temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        context_window=resolve_max_length(config.model_name, None),
        step=version,
    ).derived(*position)
    place = RolloutPlace(config.log_path, ("replay", 0, 0))
    with at_place(place), replayed_calls(None):
        strategy = config.effective_rollout_strategy()
        return await do_group_rollout(builder, policy, strategy=strategy, config=config.rollouts())


def _rows(group: Rows, result: TrajectoryGroup) -> Rows:
    return group_rows(RecordedGroup(group[0]["group"], result), ImageFiles())


def _tokens(row: dict) -> np.ndarray:
    return np.asarray(row.get("answer", ()), np.int32)


def _logprobs(row: dict) -> np.ndarray:
    return np.asarray(row.get("logprobs", ()), np.float32)
