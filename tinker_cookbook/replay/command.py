"""The command: which steps and episodes are computed again, and what is printed."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.replay.batches import train_batch
from tinker_cookbook.replay.compared import Compared, Result
from tinker_cookbook.replay.environments import grade_again, sample_live
from tinker_cookbook.replay.episode_test import write_test
from tinker_cookbook.replay.recorded_run import RecordedRun, Train, open_run
from tinker_cookbook.replay.rl_steps import check_repeatable, sample, train_step
from tinker_cookbook.replay.trajectories import Rows
from tinker_cookbook.rl.config import Config
from tinker_cookbook.supervised.batch_loop import BatchConfig
from tinker_cookbook.training.config import TrainingConfig


@chz.chz
class ReplaySettings:
    """Settings of a replay."""

    run: str = chz.field(doc="Log folder of the run")
    step: int = chz.field(doc="Step, as in metrics.jsonl")
    split: str = chz.field(default="train", doc="train, or eval_NAME of an evaluation")
    group: int | None = chz.field(default=None, doc="Only this group")
    episode: int | None = chz.field(default=None, doc="Only this member of the groups")
    what: str | None = chz.field(
        default=None,
        doc="episodes: sample them again (default of RL); update: train the step again, and "
        "compare the trainer's log-probabilities and the adapter (default of other loops); "
        "grading: give the recorded answers to the environments again, and compare prompts, "
        "rewards and metrics",
    )
    tools: Literal["recorded", "live"] = chz.field(
        default="recorded",
        doc="Results of tools: recorded, or live: the tools run. With what=episodes, live samples "
        "whole groups in their environments, instead of the recorded prompts",
    )
    pytest: str | None = chz.field(
        default=None,
        doc="--pytest out=FILE: write a test of the environment's grading of the chosen episode",
    )


async def main(settings: ReplaySettings) -> None:
    """Replays a step and prints what differs; exits with 1 if something does."""
    result = await compare(settings)
    for line in result.lines():
        print(line)
    if not result.passed:
        sys.exit(1)


async def compare(settings: ReplaySettings) -> Result:
    """Computes a step again and compares it with the record.

    Raises:
        ConfigurationError: There is no such run, step, group or episode, or the run has none.
        DataError: The record or the data lack what is needed.
    """
    with open_recorded(settings.run, settings.step) as run:
        config, what = run.config, settings.what
        what = what or ("episodes" if isinstance(config, Config) else "update")
        if what not in ("episodes", "update", "grading"):
            raise ConfigurationError(f"what: got {what!r}, expected episodes, update or grading")
        if what == "update" and settings.split != "train":
            raise ConfigurationError(
                f"split: got {settings.split}, but what=update repeats a step of training; "
                "expected train"
            )
        # Before any weights are loaded or trained.
        rows = _chosen(run, settings)
        if what == "update":
            result = await _update(run, settings.step)
        elif not isinstance(config, Config):
            raise ConfigurationError(
                f"what: got {what}, but a run of {type(config).__name__} has no environments; "
                "expected update"
            )
        elif what == "grading" or settings.pytest is not None:
            result = await _grade(run, config, rows, settings)
        else:
            result = await _sample(run, config, rows, settings)
        result.origins = run.origins(settings.step, settings.split)
        return result


async def _sample(run: RecordedRun, config: Config, rows: Rows, settings: ReplaySettings) -> Result:
    result, episode, split = Result(), settings.episode, settings.split
    # An asynchronous step has episodes of several versions of the weights.
    for version, found in groupby(rows, lambda row: row["weights_step"]):
        of_version = list(found)
        client = await run.weights_after(version)
        sampler = await client.save_weights_and_get_sampling_client()
        if settings.tools == "live":
            part = await sample_live(config, sampler, version, of_version, split, episode)
            result.others += part.others
        else:
            of_version = [row for row in of_version if episode in (None, row["member"])]
            part = Result(await sample(run, sampler, of_version, split))
        result.compared += part.compared
    if settings.tools == "live" and not result.others:
        result.also.append("prompts, rewards and metrics")
    return result


async def _grade(run: RecordedRun, config: Config, rows: Rows, settings: ReplaySettings) -> Result:
    group, episode, split = settings.group, settings.episode, settings.split
    live = settings.tools == "live"
    if settings.pytest is None:
        return await grade_again(config, rows, split, live=live, episode=episode)
    if group is None or episode is None:
        raise ConfigurationError("pytest: a test is of one episode; give group= and episode=")
    path = Path(settings.pytest)
    await write_test(run, rows, episode, split, settings.step, path)
    # The test fails where the environment grades otherwise today.
    result = await grade_again(config, rows, split, live=live, episode=episode)
    result.notes.append(f"wrote {path}; run it with: pytest {path}")
    return result


async def _update(run: RecordedRun, step: int) -> Result:
    client = await run.weights_after(step - 1)
    compared = await run.train(run, client, step)
    result = Result(compared, "turns" if isinstance(run.config, Config) else "examples")
    if not compared:
        result.notes.append(f"step {step} trained on nothing")
    saved = run.checkpoint_after(step)
    if saved is None or saved.state_path is None:
        result.notes.append(
            f"the adapter is not compared: there is no checkpoint after step {step}; a replay of "
            f"step {step + 1} uses it"
        )
        return result
    result.others += await run.different_tensors(client, saved.state_path)
    if not result.others:
        result.also.append(f"adapter of {saved.state_path}")
    return result


def _chosen(run: RecordedRun, settings: ReplaySettings) -> Rows:
    """Returns the rows of the chosen groups, in the order of their weights.

    Raises:
        ConfigurationError: There is no such group or episode.
    """
    rows = run.rows(settings.step, settings.split)
    for name, column in (("group", "group"), ("episode", "member")):
        wanted = getattr(settings, name)
        if wanted is None:
            continue
        if column not in rows[0]:
            raise ConfigurationError(f"{name}: got {wanted}, but this run has no episodes")
        known = sorted({row[column] for row in rows})
        if wanted not in known:
            raise ConfigurationError(
                f"{name}: got {wanted}, expected {known[0]} to {known[-1]} in step {settings.step}"
            )
        # All members of a group may be graded together.
        if name == "group":
            rows = [row for row in rows if row[column] == wanted]
    if "weights_step" in rows[0] and rows[0]["weights_step"] is None:
        raise ConfigurationError(
            f"split: got {settings.split}, an evaluation with settings of its own, which cannot be "
            "replayed; expected train or eval_test"
        )
    return sorted(rows, key=lambda row: row.get("weights_step", 0))


def open_recorded(log_path: str, step: int) -> AbstractContextManager[RecordedRun]:
    """Connects to the backend of a recorded run, to replay ``step``; see ``open_run``."""
    return open_run(log_path, step, _train_of)


def _train_of(config: TrainingConfig) -> Train | None:
    if isinstance(config, Config):
        return _train_rl
    return train_batch if isinstance(config, BatchConfig) else None


async def _train_rl(run: RecordedRun, client: Any, step: int) -> list[Compared]:
    config = run.config_of(step)
    assert isinstance(config, Config)
    check_repeatable(config)
    return await train_step(run, client, step)
