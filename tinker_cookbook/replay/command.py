"""The command: which steps and episodes are computed again, and what is printed."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.replay.batches import train_batch
from tinker_cookbook.replay.compared import Compared, Result
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
        "compare the trainer's log-probabilities and the adapter (default of other loops)",
    )


async def main(settings: ReplaySettings) -> None:
    """Replays a step and prints what differs; exits with 1 if something does."""
    result = await compare(settings)
    for line in result.lines():
        print(line)
    if not result.passed:
        sys.exit(1)


async def compare(settings: ReplaySettings) -> Result:
    """Computes a step again and compares it with the record."""
    with open_run(settings.run, _train_of) as run:
        what = settings.what or ("episodes" if isinstance(run.config, Config) else "update")
        if what not in ("episodes", "update"):
            raise ConfigurationError(f"what: got {what!r}, expected episodes or update")
        # Before any weights are loaded or trained.
        rows = _chosen(run, settings)
        if what == "update":
            result = await _update(run, settings.step)
        elif isinstance(run.config, Config):
            result = Result(await _sample(run, rows, settings.split))
        else:
            raise ConfigurationError(
                f"what: got episodes, but a run of {type(run.config).__name__} samples none; "
                "expected update"
            )
        result.origins = run.origins(settings.step, settings.split)
        return result


async def _sample(run: RecordedRun, rows: Rows, split: str) -> list[Compared]:
    compared: list[Compared] = []
    # An asynchronous step has episodes of several versions of the weights.
    for version, of_version in groupby(rows, lambda row: row["weights_step"]):
        client = await run.weights_after(version)
        sampler = await client.save_weights_and_get_sampling_client()
        compared += await sample(run, sampler, list(of_version), split)
    return compared


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
    """Returns the rows of the chosen episodes, in the order of their weights."""
    rows, chosen = run.rows(settings.step, settings.split), {}
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
        chosen[column] = wanted
    rows = [row for row in rows if all(row[key] == value for key, value in chosen.items())]
    return sorted(rows, key=lambda row: row.get("weights_step", 0))


def _train_of(config: TrainingConfig) -> Train | None:
    if isinstance(config, Config):
        return _train_rl
    return train_batch if isinstance(config, BatchConfig) else None


async def _train_rl(run: RecordedRun, client: Any, step: int) -> list[Compared]:
    assert isinstance(run.config, Config)
    check_repeatable(run.config)
    return await train_step(run, client, step)
