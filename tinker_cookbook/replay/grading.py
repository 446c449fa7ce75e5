"""Runs recorded answers through the environments of a run again: prompts, rewards, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.record.episodes import RecordedGroup, common_prefix, group_rows
from tinker_cookbook.record.images import ImageFiles
from tinker_cookbook.record.read import whole_prompts
from tinker_cookbook.replay.trajectories import Rows
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.loop.sources import problem_batches
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.place import RolloutPlace, at_place
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory, TrajectoryGroup
from tinker_cookbook.run.config import load_config
from tinker_cookbook.tool_use.recording import replayed_calls
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.user_classes import overrides

ToolCalls = Mapping[int, Sequence[Mapping[str, Any]]]
"""Recorded tool calls of each member of a group; see ``ToolEpisode.rows``."""


@dataclass(frozen=True)
class Answer:
    """Recorded tokens of one turn, and why they ended: ``stop`` or ``length``."""

    tokens: list[int]
    stop_reason: str = "stop"


Answers = Mapping[int, Sequence[Answer]]
"""Answers of each member of a group, in the order of its turns."""


@dataclass(frozen=True)
class RecordedAnswers(TokenCompleter):
    """Policy that repeats recorded answers."""

    answers: Answers
    path: tuple[int, ...] = (0, 0)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Returns the answer of the member and the turn that ``derived`` was called with.

        Raises:
            DataError: The environment goes on after the last recorded answer.
        """
        member, turn = self.path[:2]
        answers = self.answers[member]
        if turn >= len(answers):
            raise DataError(
                f"episode {member}: the environment asks for an answer in turn {turn}, but the "
                f"recorded episode ended after {len(answers)}"
            )
        found = answers[turn]
        # Grading needs no log-probabilities, but a transition must have some.
        return TokensWithLogprobs(found.tokens, [0.0] * len(found.tokens), found.stop_reason)

    def derived(self, *path: int) -> RecordedAnswers:
        """Returns the policy of a member and a turn."""
        return replace(self, path=path)


@dataclass(frozen=True)
class Members(EnvGroupBuilder):
    """Some members of a group; ``compute_group_rewards`` of the builder needs all of them."""

    inner: EnvGroupBuilder
    members: Sequence[int]
    size: int | None = None
    """Number of all environments, if it is known."""

    async def make_envs(self) -> Sequence[Env]:
        """Returns the environments of the members."""
        envs = await self.inner.make_envs()
        if max(self.members) >= len(envs) or self.size not in (None, len(envs)):
            raise DataError(
                f"group: the record has {len(self.members)} episodes, but "
                f"{type(self.inner).__name__} makes {len(envs)} environments; episodes that failed "
                "are not recorded, or the data have changed"
            )
        return [envs[member] for member in self.members]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns the rewards of the builder."""
        return await self.inner.compute_group_rewards(trajectory_group, env_group)

    async def cleanup(self) -> None:
        """Releases the resources of the builder."""
        await self.inner.cleanup()


async def builder_of(config: Config, split: str, batch: int, group: int) -> EnvGroupBuilder:
    """Returns the builder of a group: of a batch over all epochs, or of the test set.

    Raises:
        ConfigurationError: The data have no such group any more.
    """
    if split not in ("train", "eval_test"):
        raise ConfigurationError(
            f"split: got {split!r}, expected train or eval_test: only these are run in "
            "environments of the run's data"
        )
    train_set, test_set = await config.data_builder()()
    if split == "train":
        (groups,) = await asyncio.to_thread(
            lambda: list(problem_batches(train_set, config.seed, batch, batch + 1))
        )
        builders = [one.builder for one in groups]
    else:
        batches = range(len(test_set)) if test_set is not None else ()
        builders = [one for i in batches if test_set is not None for one in test_set.get_batch(i)]
    builder = builders[group] if group < len(builders) else None
    if builder is None:
        raise ConfigurationError(
            f"group: got {group} of batch {batch} of {split}, but the data have "
            f"{len(builders)} groups there; they have changed since the run"
        )
    return builder


def is_graded_together(builder: EnvGroupBuilder) -> bool:
    """Returns whether the reward of a member may depend on the others."""
    return overrides(builder, EnvGroupBuilder, "compute_group_rewards")


async def run_answers(
    config: Config,
    builder: EnvGroupBuilder,
    answers: Answers,
    calls: ToolCalls | None,
    size: int | None = None,
) -> TrajectoryGroup:
    """Runs the environments of the members of ``answers`` with their recorded answers.

    ``calls`` has the tool calls of these members; ``None`` runs the tools. ``size`` is the number
    of all environments of the group, if these are all.

    Raises:
        DataError: The environment asks for other answers or calls than the recorded ones.
        RolloutFailedError: An environment raised an error.
    """
    members = sorted(answers)
    policy = RecordedAnswers({i: answers[member] for i, member in enumerate(members)})
    own = None if calls is None else [calls.get(member, ()) for member in members]
    with at_place(RolloutPlace(config.log_path, ("replay", 0, 0))), replayed_calls(own):
        return await do_group_rollout(
            Members(builder, members, size), policy, config=config.rollouts()
        )


@dataclass(frozen=True)
class Graded:
    """Grading of one episode. ``problem`` is the digest of its first prompt, ``rewards`` are those
    of its turns, and ``reward`` is their sum and the reward of the group."""

    problem: str | None
    rewards: list[float]
    reward: float
    stop_reason: str
    metrics: Metrics


def grade(
    config: Mapping[str, Any],
    *,
    split: str = "train",
    batch: int = 0,
    group: int,
    episode: int,
    answers: Answers,
    tool_calls: ToolCalls | None = None,
) -> Graded:
    """Returns the grading of an episode, for tests of an environment.

    Args:
        config: Settings of the run, as in its ``config.json``.
        split: ``train``, or ``eval_test`` for a group of the test set.
        batch: Batch of the training set, counted over all epochs.
        group: Index of the group in the batch or in the test set.
        episode: Index of the episode in the group.
        answers: Answers of this episode, and of the others if the group is graded together.
        tool_calls: Recorded calls of these episodes; ``None`` runs the tools.
    """
    loaded = load_config(config)

    async def run() -> TrajectoryGroup:
        builder = await builder_of(loaded, split, batch, group)
        return await run_answers(loaded, builder, answers, tool_calls)

    rows = group_rows(RecordedGroup(group, asyncio.run(run())), ImageFiles())
    place = sorted(answers).index(episode)
    return graded([row for row in rows if row["member"] == place])


def graded(turns: Rows) -> Graded:
    """Returns the grading of the episode with these rows."""
    first = turns[0]
    return Graded(
        first.get("problem"),
        [turn["reward"] for turn in turns if turn.get("turn") is not None],
        first["episode_reward"],
        first["episode_stop_reason"],
        json.loads(first["episode_metrics"] or "{}"),
    )


def answers_of(rows: Rows) -> dict[int, list[Answer]]:
    """Returns the answers of each member of one recorded group."""
    return {
        member: [
            Answer(row["answer"], row["stop_reason"]) for row in turns if row["turn"] is not None
        ]
        for member, turns in _by_member(rows)
    }


def calls_of(rows: Rows) -> dict[int, list[dict[str, Any]]]:
    """Returns the recorded tool calls of each member of one recorded group."""
    return {
        member: json.loads(turns[0]["episode_tool_calls"] or "[]")
        for member, turns in _by_member(rows)
    }


def _by_member(rows: Rows) -> list[tuple[int, Rows]]:
    key: Callable[[dict[str, Any]], int] = lambda row: row["member"]  # noqa: E731
    return [(member, list(turns)) for member, turns in groupby(rows, key)]


def different_grading(before: Rows, now: Rows) -> list[str]:
    """Returns a line for each first difference of an episode: prompts, rewards, metrics."""
    lines, again = [], dict(_by_member(now))
    for member, turns in _by_member(before):
        name = f"group {turns[0]['group']}, episode {member}"
        lines += [f"{name}{line}" for line in _differences(turns, again.get(member, []))]
    return lines


def _differences(before: Rows, now: Rows) -> list[str]:
    if len(before) != len(now):
        return [f": had {len(before)} turns, has {len(now)}"]
    prompts = zip(whole_prompts(before), whole_prompts(now), strict=True)
    for old, new, (was, is_) in zip(before, now, prompts, strict=True):
        where = f", turn {old['turn']}"
        same = common_prefix(was, is_)
        if same < max(len(was), len(is_)):
            tokens = [str(one[same]) if same < len(one) else "nothing" for one in (was, is_)]
            return [f"{where}, prompt: token {same} was {tokens[0]}, is {tokens[1]}"]
        for column in ("reward", "metrics"):
            if old[column] != new.get(column):
                return [f"{where}, {column}: was {old[column]}, is {new.get(column)}"]
    first, second = before[0], now[0]
    return [
        f", {column.removeprefix('episode_')}: was {first[column]}, is {second.get(column)}"
        for column in ("episode_reward", "episode_stop_reason", "episode_metrics")
        if first[column] != second.get(column)
    ][:1]
