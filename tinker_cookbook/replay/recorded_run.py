"""A recorded run with a connection to its backend: its rows, and its weights after any step."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tinker_cookbook.backends import Connection, TrainingClient
from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.checkpoint_utils import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.engine.sampler_settings import SamplerSettings
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.record.origin import origin_of
from tinker_cookbook.record.read import Record
from tinker_cookbook.replay.compared import Compared
from tinker_cookbook.replay.trajectories import Rows
from tinker_cookbook.run.code_state import code_state
from tinker_cookbook.run.config import load_config_of_step
from tinker_cookbook.run.jsonl import Row, read_rows
from tinker_cookbook.run.paths import CODE_DIFF_FILE, METRICS_FILE, local_path
from tinker_cookbook.run.resume import last_existing
from tinker_cookbook.run.scan import is_run_folder
from tinker_cookbook.run.weights import create_training_client
from tinker_cookbook.training.config import TrainingConfig
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.weights import download

Train: TypeAlias = "Callable[[RecordedRun, TrainingClient, int], Awaitable[list[Compared]]]"
"""Repeats the update of a step, and compares the trainer's log-probabilities."""


@dataclass
class RecordedRun:
    """A recorded run on a connection. ``train`` repeats one of its updates.

    ``config`` has the settings of the replayed step; updates before it may have had others.
    """

    record: Record
    config: TrainingConfig
    connection: Connection
    train: Train
    metrics: dict[int, Row] = field(init=False)

    def __post_init__(self) -> None:
        rows = read_rows(self.record.log_path / METRICS_FILE)
        self.metrics = {row["step"]: row for row in rows if "step" in row}

    def config_of(self, step: int) -> TrainingConfig:
        """Returns the settings that the run had in ``step``."""
        return load_config_of_step(self.record.log_path, step)

    def origins(self, step: int, split: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Returns what computed the recorded step, and what computes it now, with the code."""
        then, now = self.record.origin(step, split), origin_of(self.connection)
        file = self.record.log_path / CODE_DIFF_FILE
        if file.is_file() and then:
            then |= {"code": _code(file.read_text(encoding="utf-8"))}
            now |= {"code": _code(code_state())}
        return then, now

    def adam_params(self, step: int) -> tinker.AdamParams:
        """Returns the optimizer settings of the update that finished ``step``."""
        row = self.metrics.get(step)
        if row is None:
            raise DataError(
                f"{self.record.log_path / METRICS_FILE}: has no row of step {step}, from which "
                "its learning rate follows"
            )
        # RL and the other loops have their own names for the finished share of the run.
        share = row.get("progress/done_frac") or row["progress"]
        return self.config_of(step).adam_params(step - 1, round(step / share))

    async def weights_after(self, step: int) -> TrainingClient:
        """Returns a training client after ``step`` updates.

        It starts from the nearest checkpoint before that still exists, or from the beginning, and
        repeats the recorded updates after it.

        Raises:
            DataError: The record lacks one of these updates.
        """
        start, client = await self._nearest(step)
        if start < step:
            steps = f"step {step}" if start + 1 == step else f"steps {start + 1} to {step}"
            print(f"training {steps} again from the record", flush=True)
        for number in range(start + 1, step + 1):
            await self.train(self, client, number)
        return client

    async def _nearest(self, step: int) -> tuple[int, TrainingClient]:
        listed = load_checkpoints_file(self.record.log_path)
        before = [one for one in listed if one.batch is not None and one.batch <= step]
        before.sort(key=lambda one: one.batch or 0)
        nearest, gone = await last_existing(self.connection.service, before)
        start = (nearest.batch or 0) if nearest is not None else 0
        for path in gone:
            print(f"{path} no longer exists", flush=True)
        missing = [
            number
            for number in range(start + 1, step + 1)
            if self.record.table(number, columns=["datum"]) is None and not self.skipped(number)
        ]
        if missing:
            raise DataError(
                f"{self.record.log_path}: the weights after step {step} are those of the "
                f"checkpoint after step {start} and {step - start} updates, but the record has no "
                f"step {', '.join(map(str, missing[:5]))}; replay a step up to {missing[0]}, or "
                "one after a later checkpoint"
            )
        config = self.config_of(start + 1)
        return start, await create_training_client(self.connection.service, config, nearest)

    def skipped(self, step: int) -> bool:
        """Returns whether the batch of the step had no token to train on."""
        return bool(self.metrics.get(step, {}).get("num_skipped_batches"))

    def checkpoint_after(self, step: int) -> CheckpointRecord | None:
        """Returns a checkpoint after exactly ``step`` updates."""
        listed = load_checkpoints_file(self.record.log_path)
        return next((one for one in listed if one.batch == step and one.state_path), None)

    async def different_tensors(self, client: TrainingClient, saved: str) -> list[str]:
        """Returns a line for each tensor of the client's adapter that is not that of ``saved``."""
        # Saved only to be read: the protocol has no other way to an adapter's tensors.
        response = await client.save_weights_for_sampler("replay", ttl_seconds=3600)
        now = self._tensors(response.path)
        before = self._tensors(saved)
        rest = self.connection.service.create_rest_client()
        await rest.delete_checkpoint_from_tinker_path(response.path)
        lines = []
        for name in sorted(before.keys() | now.keys()):
            if name not in before or name not in now or before[name].shape != now[name].shape:
                lines.append(f"adapter, {name}: only one of both has it in this shape")
            elif not np.array_equal(before[name], now[name]):
                largest = np.abs(before[name] - now[name]).max()
                lines.append(f"adapter, {name}: largest difference {largest:.2g}")
        return lines

    def _tensors(self, path: str) -> dict[str, np.ndarray]:
        from safetensors.numpy import load

        name = "adapter_model.safetensors"
        store: Any = getattr(self.connection.service, "store", None)
        if store is not None:
            return load(store.peft_files(path)[name])
        with tempfile.TemporaryDirectory() as folder:
            download(tinker_path=path, output_dir=folder, base_url=self.connection.url)
            return load((Path(folder) / name).read_bytes())

    def rows(self, step: int, split: str) -> Rows:
        """Returns the recorded rows of a step; raises ``ConfigurationError`` without any."""
        table = self.record.table(step, split)
        if table is None:
            raise ConfigurationError(f"step, split: got {step}, {split}; {self._known(step)}")
        if not {"answer", "tokens"} & set(table.column_names):
            raise ConfigurationError(
                f"run: {self.record.log_path} was recorded with record=summary, without tokens; "
                "a replay needs record=full"
            )
        return table.to_pylist()

    def _known(self, step: int) -> str:
        known = self.record.steps()
        if step in known:
            return f"expected one of the splits of step {step}: {', '.join(known[step])}"
        if self.skipped(step):
            return "the batch of this step had no token to train on"
        return f"expected one of the {len(known)} recorded steps, {min(known)} to {max(known)}"


@contextmanager
def open_run(
    log_path: str, step: int, choose: Callable[[TrainingConfig], Train | None]
) -> Iterator[RecordedRun]:
    """Connects to the backend of a recorded run, to replay ``step``.

    ``choose`` returns how an update of such a run is repeated; ``None`` if it cannot be.

    Raises:
        ConfigurationError: There is no such run, it has no record, or its settings cannot be
            built again.
    """
    folder = local_path(log_path, "run")
    if not is_run_folder(folder):
        raise ConfigurationError(f"run: got {log_path!r}, expected the log folder of a run")
    record, config = Record(folder), load_config_of_step(folder, step)
    train = choose(config) if isinstance(config, TrainingConfig) else None
    if train is None or not isinstance(config, TrainingConfig):
        raise ConfigurationError(
            f"run: {folder} is a run of {type(config).__name__}, expected one of supervised "
            "training, preferences, distillation or reinforcement learning"
        )
    if not record.steps():
        why = "record=off" if config.record == "off" else "no finished step, or an older version"
        raise ConfigurationError(
            f"run: {folder} has no record ({why}); expected a run with record=full"
        )
    with connect_with(config, sampler=SamplerSettings.of(config)) as connection:
        yield RecordedRun(record, config, connection, train)


def _code(diff: str) -> str:
    """Returns the commits of a run's ``code.diff``, and the size of the changes after them."""
    lines = diff.splitlines()
    commits = [line.removeprefix("# commit: ")[:12] for line in lines if "# commit: " in line[:10]]
    changed = [line for line in lines if not line.startswith("# ")]
    text = "\n".join(changed).strip()
    return ", ".join(commits) + (f" with {len(changed)} changed lines" if text else "")
