"""Repeats the updates of supervised training, preferences and off-policy distillation."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinker_cookbook.backends import TrainingClient
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.reference import create_reference_client
from tinker_cookbook.record.read import Record
from tinker_cookbook.replay.compared import Compared
from tinker_cookbook.replay.recorded_run import RecordedRun
from tinker_cookbook.replay.trajectories import model_input
from tinker_cookbook.utils.imports import tinker


async def train_batch(run: RecordedRun, client: TrainingClient, step: int) -> list[Compared]:
    """Repeats the update of a step on its recorded examples."""
    if run.skipped(step):
        return []
    rows = run.rows(step, "train")
    data = [_datum(run.record, row) for row in rows]
    config = run.config_of(step)
    if isinstance(config, train_dpo.Config):
        pairs = await _pairs(run, config)
        passed = pairs.submit(client, await pairs.prepare(step - 1, data))
    else:
        # The record has the targets and weights that a teacher gave.
        passed = client.forward_backward(data, "cross_entropy")
    updated = client.optim_step(run.adam_params(step))
    output = await passed
    await updated
    compared = []
    for row, result in zip(rows, output.loss_fn_outputs, strict=True):
        now = result["logprobs"].to_numpy().reshape(-1).astype(np.float32)
        targets = np.asarray(row["targets"], np.int32)
        before = np.asarray(row["logprobs"], np.float32)
        compared.append(Compared(f"example {row['datum']}", (targets, targets), (before, now)))
    return compared


async def _pairs(run: RecordedRun, config: train_dpo.Config) -> train_dpo.Pairs:
    reference = None
    if config.pair_loss.needs_reference:
        reference = await create_reference_client(
            run.connection.service,
            config,
            config.reference_model_name,
            samples_states=run.connection.kind == "local",
        )
    return train_dpo.Pairs(config.pair_loss, reference)


def _datum(record: Record, row: dict[str, Any]) -> tinker.Datum:
    targets = np.asarray(row["targets"], np.int64)
    inputs: dict[str, np.ndarray] = {"target_tokens": targets}
    if row["weights"] is not None:
        inputs["weights"] = np.asarray(row["weights"], np.float32)
    if (count := row["targets_per_token"]) > 1:
        inputs = {name: values.reshape(-1, count) for name, values in inputs.items()}
    return tinker.Datum(
        model_input=model_input(record, np.asarray(row["tokens"], np.int32), row["images"]),
        loss_fn_inputs={
            name: tinker.TensorData.from_numpy(values) for name, values in inputs.items()
        },
    )
