"""Samples and trains a recorded step of an RL run again, and compares every number.

    python -m tinker_cookbook.replay LOG_PATH step=12
    python -m tinker_cookbook.replay LOG_PATH step=12 group=3 member=1
    python -m tinker_cookbook.replay LOG_PATH step=12 what=update

It loads the weights that sampled the step, or trains them again from the nearest checkpoint on the
recorded batches, and samples with the recorded seeds. On a CPU the result is identical; otherwise
it prints the first token that differs with both log-probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import chz
import numpy as np

from tinker_cookbook.backends import Connection, SamplingClient, TrainingClient
from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.checkpoint_utils import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.record.episodes import Numbers, Tokens
from tinker_cookbook.record.read import Record, open_record, whole_prompts
from tinker_cookbook.record.schema import IMAGE
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.loop.adjuster import submit_loss
from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.run.config import load_config
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.run.paths import METRICS_FILE, local_path
from tinker_cookbook.run.weights import create_training_client
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.command_line.subcommands import with_keys
from tinker_cookbook.utils.imports import tinker


@chz.chz
class ReplaySettings:
    """Settings of a replay."""

    run: str = chz.field(doc="Log folder of the run")
    step: int = chz.field(doc="Step, as in metrics.jsonl")
    split: str = chz.field(default="train", doc="train, or eval_NAME of an evaluation")
    group: int | None = chz.field(default=None, doc="Only this group")
    member: int | None = chz.field(default=None, doc="Only this member of the groups")
    what: str = chz.field(
        default="episodes",
        doc="episodes: sample them again; update: train the step again and compare the "
        "log-probabilities of the trainer",
    )


async def main(settings: ReplaySettings) -> None:
    """Replays a step and prints what differs."""
    for line in summary(await compare(settings)):
        print(line)


async def compare(settings: ReplaySettings) -> list[Compared]:
    """Computes a step again and returns each turn with what the record has."""
    record, config = open_record(settings.run), load_config(local_path(settings.run))
    if not isinstance(config, Config):
        raise ConfigurationError(
            f"run: {settings.run} is a run of {type(config).__name__}, expected one of RL"
        )
    if settings.what not in ("episodes", "update"):
        raise ConfigurationError(f"what: got {settings.what!r}, expected episodes or update")
    replay = Replay(record, config, connect_with(config, sampler=SamplerSettings.of(config)))
    compared: list[Compared] = []
    with replay.connection:
        if settings.what == "update":
            compared += await replay.train(
                await replay.weights_after(settings.step - 1), settings.step
            )
        else:
            # An asynchronous step has episodes of several versions of the weights.
            for version, rows in groupby(
                _chosen(record, settings), lambda row: row["weights_step"]
            ):
                client = await replay.weights_after(version)
                sampler = await client.save_weights_and_get_sampling_client()
                compared += await replay.sample(sampler, list(rows), settings.split)
    return compared


@dataclass(frozen=True)
class Compared:
    """The answer of one turn, recorded and computed again; ``logprobs`` are [T] each."""

    name: str
    tokens: tuple[Tokens, Tokens]
    logprobs: tuple[Numbers, Numbers]

    @property
    def first_different(self) -> int | None:
        """Index of the first token with another id or log-probability; ``None``: identical."""
        lengths = {len(one) for one in (*self.tokens, *self.logprobs)}
        shorter = min(lengths)
        differ = np.zeros(shorter, bool)
        for before, now in (self.tokens, self.logprobs):
            differ |= before[:shorter] != now[:shorter]
        if differ.any():
            return int(differ.argmax())
        return shorter if len(lengths) > 1 else None


def summary(compared: list[Compared]) -> Iterator[str]:
    """Yields how many turns are identical, and the first difference of each other turn."""
    different = [one for one in compared if one.first_different is not None]
    tokens = sum(len(one.tokens[0]) for one in compared)
    if not different:
        yield f"identical: {len(compared)} turns, {tokens} tokens"
        return
    yield f"{len(compared) - len(different)} of {len(compared)} turns are identical"
    for one in different[:10]:
        at = one.first_different or 0
        parts = [
            "nothing" if at >= len(ids) else f"{ids[at]} ({values[at]:.6f})"
            for ids, values in zip(one.tokens, one.logprobs, strict=True)
        ]
        yield f"{one.name}: token {at} was {parts[0]}, is {parts[1]}"


@dataclass
class Replay:
    """Computes recorded steps again."""

    record: Record
    config: Config
    connection: Connection

    async def weights_after(self, step: int) -> TrainingClient:
        """Returns a training client after ``step`` updates.

        It starts from the nearest checkpoint before, and repeats the recorded updates after it.
        """
        saved = load_checkpoints_file(self.record.log_path)
        before = [one for one in saved if one.state_path and (one.batch or 0) <= step]
        nearest: CheckpointRecord | None = max(before, key=lambda one: one.batch or 0, default=None)
        start = (nearest.batch or 0) if nearest is not None else 0
        client = await create_training_client(self.connection.service, self.config, nearest)
        if start < step:
            print(f"training steps {start + 1} to {step} again from the record", flush=True)
        for number in range(start + 1, step + 1):
            await self.train(client, number)
        return client

    async def train(self, client: TrainingClient, step: int) -> list[Compared]:
        """Repeats the update of a step; compares the trainer's log-probabilities."""
        if self.config.importance_ratio_cap:
            raise ConfigurationError("importance_ratio_cap: such updates cannot be repeated")
        rows = [row for row in _rows(self.record, step, "train") if row["datum"] is not None]
        rows.sort(key=lambda row: (row["datum"], row["turn"]))
        # 1. Submit all passes and optimizer steps, as the loop did.
        adam, futures, turns, steps = self._adam_params(step), [], [], []
        for _, substep in groupby(rows, lambda row: row["optimizer_step"]):
            for _, passed in groupby(substep, lambda row: row["update_pass"]):
                data = []
                for _, turn_rows in groupby(passed, lambda row: row["datum"]):
                    datum, starts = _datum(list(turn_rows))
                    data.append(datum)
                    turns.append(starts)
                futures.append(
                    submit_loss(
                        client, data, self.config.training_loss_fn(), self.config.loss_fn_config
                    )
                )
            steps.append(client.optim_step(adam))
        outputs = [output for future in futures for output in (await future).loss_fn_outputs]
        for done in steps:
            await done
        # 2. Compare the log-probabilities of the answers.
        compared = []
        for output, starts in zip(outputs, turns, strict=True):
            values = output["logprobs"].to_numpy()
            for row, start in starts:
                answer = np.asarray(row["answer"], np.int32)
                now = values[start : start + len(answer)].astype(np.float32)
                before = np.asarray(row["trainer_logprobs"], np.float32)
                compared.append(Compared(_name(row), (answer, answer), (before, now)))
        return compared

    async def sample(
        self, client: SamplingClient, rows: list[dict[str, Any]], split: str
    ) -> list[Compared]:
        """Samples the answers of turns again with their seeds."""
        config, tasks = self.config, []
        temperature = config.temperature if split == "train" else config.eval_temperature
        for _, episode in groupby(rows, lambda row: (row["group"], row["member"])):
            turns = list(episode)
            for row, prompt in zip(turns, whole_prompts(turns), strict=True):
                if row["turn"] is None or not row["answer"]:
                    continue
                if row["seed"] is None:
                    raise DataError(f"{_name(row)}: was not sampled with a seed")
                # Stop sequences are not needed: the answer ended at its last token.
                params = tinker.SamplingParams(
                    max_tokens=len(row["answer"]),
                    temperature=temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                    seed=row["seed"],
                )
                tasks.append((row, _model_input(prompt), params))
        # Submitted together, so that the engine batches them.
        futures = [
            client.sample(prompt=prompt, num_samples=row["sample"] + 1, sampling_params=params)
            for row, prompt, params in tasks
        ]
        compared = []
        for (row, _, _), future in zip(tasks, futures, strict=True):
            found = (await future).sequences[row["sample"]]
            tokens = np.asarray(row["answer"], np.int32), np.asarray(found.tokens, np.int32)
            logprobs = (
                np.asarray(row["logprobs"], np.float32),
                np.asarray(found.logprobs, np.float32),
            )
            compared.append(Compared(_name(row), tokens, logprobs))
        return compared

    def _adam_params(self, step: int) -> tinker.AdamParams:
        for row in read_rows(self.record.log_path / METRICS_FILE):
            if row.get("step") == step:
                total = round(step / row["progress/done_frac"])
                return self.config.adam_params(step - 1, total)
        raise DataError(f"{self.record.log_path / METRICS_FILE}: has no row of step {step}")


def _chosen(record: Record, settings: ReplaySettings) -> list[dict[str, Any]]:
    """Returns the rows of the chosen episodes, in the order of their weights."""
    rows = [
        row
        for row in _rows(record, settings.step, settings.split)
        if settings.group in (None, row["group"]) and settings.member in (None, row["member"])
    ]
    if not rows:
        raise ConfigurationError(
            f"group, member: step {settings.step} has no episode of group {settings.group}, "
            f"member {settings.member}"
        )
    return sorted(rows, key=lambda row: row["weights_step"])


def _rows(record: Record, step: int, split: str) -> list[dict[str, Any]]:
    table = record.table(step, split)
    if table is None:
        known = record.steps()
        raise ConfigurationError(
            f"step: got {step} of {split}, but the record has "
            f"{f'steps {min(known)} to {max(known)}' if known else 'no steps'}"
        )
    return table.to_pylist()


def _datum(rows: list[dict[str, Any]]) -> tuple[tinker.Datum, list[tuple[dict[str, Any], int]]]:
    """Returns the datum of turns that extend each other, and where their answers begin in it."""
    prompts = whole_prompts(rows)
    turns = [
        Transition(
            ob=_model_input(prompt),
            # Losses that need the sampled sequence only tell the sequences apart.
            ac=TokensWithLogprobs(row["answer"], row["logprobs"], sequence_id=_name(row)),
            reward=0.0,
            episode_done=False,
            masked=row["masked"],
        )
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    (datum,) = trajectory_to_data(Trajectory(turns, tinker.ModelInput.empty()), 1.0)
    # Target i is token i + 1; the first prompt is whole, because the datum begins with it.
    starts = [(row, len(prompt) - 1) for row, prompt in zip(rows, prompts, strict=True)]
    advantages = np.zeros(datum.model_input.length, np.float32)
    for row, start in starts:
        advantages[start : start + len(row["answer"])] = row["advantages"]
    inputs = {**datum.loss_fn_inputs, "advantages": tinker.TensorData.from_numpy(advantages)}
    return replace(datum, loss_fn_inputs=inputs), starts


def _model_input(tokens: Tokens) -> tinker.ModelInput:
    if (tokens == IMAGE).any():
        raise DataError("the record has no images, only digests, so this cannot be replayed")
    return tinker.ModelInput.from_ints(tokens.tolist())


def _name(row: dict[str, Any]) -> str:
    return f"group {row['group']}, member {row['member']}, turn {row['turn']}"


if __name__ == "__main__":
    sys.argv[1:] = with_keys(sys.argv[1:], ("run", "step"))
    run_entrypoint(main)
