"""Samples recorded episodes of an RL run again, and repeats its updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.replay.compared import Compared
from tinker_cookbook.replay.recorded_run import RecordedRun
from tinker_cookbook.replay.trajectories import Rows, prompts_of, transitions_of, turn_name
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.loop.adjuster import submit_loss
from tinker_cookbook.rl.loop.importance import RatioStatistics, truncate_importance
from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.training.config import TrainingConfig
from tinker_cookbook.utils.imports import tinker

_Starts = list[tuple[dict[str, Any], int]]
"""Rows of the turns in a datum, and the target at which each answer begins."""


async def train_step(run: RecordedRun, client: TrainingClient, step: int) -> list[Compared]:
    """Repeats the update of a step with the recorded advantages."""
    config = _rl_config(run.config_of(step))
    recorded = run.rows(step, "train")
    turns = {
        (row["group"], row["member"], row["turn"]): turn
        for _, found in groupby(recorded, lambda row: (row["group"], row["member"]))
        for row, turn in _turns(run, list(found))
    }
    rows = [row for row in recorded if row["datum"] is not None]
    rows.sort(key=lambda row: (row["datum"], row["turn"]))
    # 1. Make the data of each pass. The loop gets the ratios of all passes of a batch before the
    # first one, in a streaming run those of each pass before it.
    passes = [
        (
            numbers,
            [_datum(turns, list(one)) for _, one in groupby(of_pass, lambda row: row["datum"])],
        )
        for numbers, of_pass in groupby(
            rows, lambda row: (row["optimizer_step"], row["update_pass"])
        )
    ]
    streams = config.stream_minibatch_config is not None
    data = [datum for _, made in passes for datum, _ in made]
    if not streams:
        data = await _with_ratios(config, client, data)
    # 2. Submit all passes and optimizer steps, as the loop did.
    futures, steps, adam, done = [], [], run.adam_params(step), 0
    for _, substep in groupby(passes, lambda one: one[0][0]):
        for _, made in substep:
            part = data[done : done + len(made)]
            done += len(made)
            if streams:
                part = await _with_ratios(config, client, part)
            loss_fn = config.training_loss_fn()
            futures.append(submit_loss(client, part, loss_fn, config.loss_fn_config))
        steps.append(client.optim_step(adam))
    outputs = [output for future in futures for output in (await future).loss_fn_outputs]
    for one in steps:
        await one
    # 3. Compare the log-probabilities of the answers.
    compared, starts_D = [], [starts for _, made in passes for _, starts in made]
    for output, starts in zip(outputs, starts_D, strict=True):
        values = output["logprobs"].to_numpy()
        for row, start in starts:
            answer = np.asarray(row["answer"], np.int32)
            now = values[start : start + len(answer)].astype(np.float32)
            before = np.asarray(row["trainer_logprobs"], np.float32)
            compared.append(Compared(turn_name(row), (answer, answer), (before, now)))
    return compared


async def sample(
    run: RecordedRun, client: SamplingClient, rows: Rows, split: str
) -> list[Compared]:
    """Samples the answers of turns again, with their recorded prompts and seeds."""
    config, tasks = _rl_config(run.config), []
    temperature = config.temperature if split == "train" else config.eval_temperature
    for _, episode in groupby(rows, lambda row: (row["group"], row["member"])):
        turns = list(episode)
        for row, prompt in zip(turns, prompts_of(run.record, turns), strict=True):
            if row["turn"] is None or not row["answer"]:
                continue
            if row["seed"] is None:
                raise DataError(f"{turn_name(row)}: was not sampled with a seed")
            # Stop sequences are not needed: the answer ended at its last token.
            params = tinker.SamplingParams(
                max_tokens=len(row["answer"]),
                temperature=temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                seed=row["seed"],
            )
            tasks.append((row, prompt, params))
    # Submitted together, so that the engine batches them.
    futures = [
        client.sample(prompt=prompt, num_samples=row["sample"] + 1, sampling_params=params)
        for row, prompt, params in tasks
    ]
    compared = []
    for (row, _, _), future in zip(tasks, futures, strict=True):
        found = (await future).sequences[row["sample"]]
        tokens = np.asarray(row["answer"], np.int32), np.asarray(found.tokens, np.int32)
        logprobs = np.asarray(row["logprobs"], np.float32), np.asarray(found.logprobs, np.float32)
        compared.append(Compared(turn_name(row), tokens, logprobs))
    return compared


def _rl_config(config: TrainingConfig) -> Config:
    assert isinstance(config, Config)
    return config


def check_repeatable(config: Config) -> None:
    """Raises ``ConfigurationError`` for updates that need more than the record has."""
    if getattr(config, "n_teacher_targets", 0):
        raise ConfigurationError(
            "n_teacher_targets: the update trained on the teachers' distributions, which the "
            "record does not have, so it cannot be repeated; a step with a checkpoint before it "
            "can be sampled again"
        )
    if config.replay_router:
        raise ConfigurationError(
            "replay_router: the update used the sampler's choices of experts, which the record "
            "does not have, so it cannot be repeated; a step with a checkpoint before it can be "
            "sampled again"
        )


async def _with_ratios(
    config: Config, client: TrainingClient, data: Sequence[tinker.Datum]
) -> list[tinker.Datum]:
    """Returns the data with the trainer's log-probabilities where ``importance_ratio_cap`` trained
    with them; the recorded advantages include the ratios."""
    cap = config.importance_ratio_cap
    if not cap:
        return list(data)
    corrected = await truncate_importance(client, data, cap, RatioStatistics())
    return [
        replace(
            new,
            loss_fn_inputs={**new.loss_fn_inputs, "advantages": old.loss_fn_inputs["advantages"]},
        )
        for old, new in zip(data, corrected, strict=True)
    ]


def _turns(run: RecordedRun, episode: Rows) -> Iterator[tuple[dict[str, Any], Transition]]:
    # The prompt of a turn may begin with a part of the turn before, which is in another datum.
    if episode[0]["turn"] is not None:
        yield from zip(episode, transitions_of(run.record, episode), strict=True)


def _datum(
    transitions: Mapping[tuple[int, int, int], Transition], rows: Rows
) -> tuple[tinker.Datum, _Starts]:
    """Returns the datum of turns that extend each other, and where their answers begin in it."""
    turns = [transitions[row["group"], row["member"], row["turn"]] for row in rows]
    (datum,) = trajectory_to_data(Trajectory(turns, tinker.ModelInput.empty()), 1.0)
    # Target i is token i + 1; the first prompt is whole, because the datum begins with it.
    starts = [(row, turn.ob.length - 1) for row, turn in zip(rows, turns, strict=True)]
    advantages = np.zeros(datum.model_input.length, np.float32)
    for row, start in starts:
        advantages[start : start + len(row["answer"])] = row["advantages"]
    inputs = {**datum.loss_fn_inputs, "advantages": tinker.TensorData.from_numpy(advantages)}
    return replace(datum, loss_fn_inputs=inputs), starts
