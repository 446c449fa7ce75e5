"""The files of one training run, in a folder of this machine or in cloud storage."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.official.stores._incremental import IncrementalReader
from tinker_cookbook.official.stores.storage import Storage, storage_join, threaded
from tinker_cookbook.run.jsonl import encode_row, parse_lines, select_rows
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, CONFIG_FILE, METRICS_FILE, SPANS_FILE

ITERATION = re.compile(r"iteration_(\d+)")
_ROLLOUTS, _LOGTREE = "_rollout_summaries.jsonl", "_logtree.json"


@dataclass
class IterationInfo:
    """What the folder of an iteration has."""

    iteration: int
    has_train_rollouts: bool = False
    has_train_logtree: bool = False
    eval_labels: list[str] = field(default_factory=list)
    """Names of the evaluations with rollouts, without ``eval_``."""


class TrainingRunStore:
    """Reads and writes the files of a run; can be pickled.

    A missing file is ``None`` or no rows. Rows are as in the file. A last line that an
    interrupted write left is skipped; any other broken file raises DataFormatError with its
    address.

    Args:
        storage: Where the run is.
        prefix: The run's folder there.
    """

    def __init__(self, storage: Storage, prefix: str = "") -> None:
        self.storage, self.prefix = storage, prefix
        self._metrics = IncrementalReader(storage, self._path(METRICS_FILE))
        self._timing = IncrementalReader(storage, self._path(SPANS_FILE))
        self._config: dict[str, Any] | None = None
        self._rollouts: dict[str, list[dict[str, Any]]] = {}

    def url(self, path: str = "") -> str:
        """Returns the address of a file of the run."""
        return self.storage.url(self._path(path))

    def _path(self, *parts: str) -> str:
        return storage_join(self.prefix, *parts)

    def _iteration_path(self, iteration: int, name: str) -> str:
        return self._path(f"iteration_{iteration:06d}", name)

    def _read_json(self, path: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.storage.read(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataFormatError(f"{self.storage.url(path)}: not JSON ({error})") from error

    def _read_rows(self, path: str) -> list[dict[str, Any]]:
        try:
            content = self.storage.read(path)
        except FileNotFoundError:
            return []
        return [row for _, row in parse_lines(content, self.storage.url(path))]

    def _write_json(self, path: str, data: Mapping[str, Any]) -> None:
        self.storage.write(path, json.dumps(data, indent=2).encode())

    def read_config(self) -> dict[str, Any] | None:
        """Returns the settings, which are read once."""
        if self._config is None:
            self._config = self._read_json(self._path(CONFIG_FILE))
        return self._config

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the latest 50,000 rows of metrics; reads only what is new."""
        self._metrics.read()
        return self._metrics.records

    def read_new_metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics since the last read."""
        return self._metrics.read()

    def metric_keys(self) -> set[str]:
        """Returns the names of the metrics that were read."""
        return self._metrics.known_keys

    def read_rollouts(self, iteration: int, base_name: str = "train") -> list[dict[str, Any]]:
        """Returns the rollout summaries of an iteration, which are read once.

        Args:
            iteration: Number of the iteration.
            base_name: ``train``, or ``eval_NAME``.
        """
        path = self._iteration_path(iteration, base_name + _ROLLOUTS)
        if path not in self._rollouts and (rows := self._read_rows(path)):
            self._rollouts[path] = rows
        return self._rollouts.get(path, [])

    def read_single_rollout(
        self, iteration: int, group_idx: int, traj_idx: int, base_name: str = "train"
    ) -> dict[str, Any] | None:
        """Returns the summary of a rollout by its group and its number in the group."""
        wanted = (group_idx, traj_idx)
        rows = self.read_rollouts(iteration, base_name)
        return next((r for r in rows if (r.get("group_idx"), r.get("traj_idx")) == wanted), None)

    def read_checkpoints(self) -> list[dict[str, Any]]:
        """Returns the rows of ``checkpoints.jsonl``."""
        return self._read_rows(self._path(CHECKPOINTS_FILE))

    def read_checkpoint_records(self) -> list[CheckpointRecord]:
        """Returns the checkpoints; raises CheckpointError for a row without a name."""
        return [CheckpointRecord.from_dict(row) for row in self.read_checkpoints()]

    def read_timing(self) -> list[dict[str, Any]]:
        """Returns the latest 50,000 rows of timing spans; reads only what is new."""
        self._timing.read()
        return self._timing.records

    def read_logtree(self, iteration: int, base_name: str = "train") -> dict[str, Any] | None:
        """Returns the tree of an iteration's log page."""
        return self._read_json(self._iteration_path(iteration, base_name + _LOGTREE))

    def list_logtrees(self, iteration: int) -> list[str]:
        """Returns the base names of an iteration's log pages, sorted."""
        names = self.storage.list_dir(self._iteration_path(iteration, ""))
        return sorted(name.removesuffix(_LOGTREE) for name in names if name.endswith(_LOGTREE))

    def list_iterations(self) -> list[IterationInfo]:
        """Returns the iterations with a folder, in order."""
        found = []
        for child in self.storage.list_dir(self._path()):
            if not (match := ITERATION.fullmatch(child)):
                continue
            names = self.storage.list_dir(self._path(child))
            labels = [name.removesuffix(_ROLLOUTS) for name in names if name.endswith(_ROLLOUTS)]
            found.append(
                IterationInfo(
                    iteration=int(match[1]),
                    has_train_rollouts="train" in labels,
                    has_train_logtree=f"train{_LOGTREE}" in names,
                    eval_labels=[x.removeprefix("eval_") for x in labels if x.startswith("eval_")],
                )
            )
        return sorted(found, key=lambda info: info.iteration)

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the settings."""
        self._write_json(self._path(CONFIG_FILE), config)
        self._config = config

    def write_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Appends a row of metrics; ``step`` is its first entry."""
        row = metrics if step is None else {"step": step, **metrics}
        self.storage.append(self._path(METRICS_FILE), encode_row(row))

    def truncate_metrics(self, from_step: int) -> int:
        """Drops rows of metrics with ``step >= from_step``, which a continued run writes again.

        The whole file is copied to ``metrics.jsonl.pre_resume_STEP`` first. Rows without a step
        are kept.

        Returns:
            The number of rows dropped.
        """
        path = self._path(METRICS_FILE)
        if not self.storage.exists(path):
            return 0
        content = self.storage.read(path)

        def keep(row: dict[str, Any]) -> bool:
            step = row.get("step")
            return not isinstance(step, int) or step < from_step

        kept, dropped = select_rows(content, keep, self.storage.url(path))
        if dropped:
            self.storage.write(f"{path}.pre_resume_{from_step:06d}", content)
            self.storage.write(path, kept)
            self._metrics = IncrementalReader(self.storage, path)
        return dropped

    def write_timing_spans(self, step: int, spans: list[dict[str, Any]]) -> None:
        """Appends the timing spans of a step, if there are any.

        A span has ``name``, ``duration``, ``wall_start`` and ``wall_end`` in seconds.
        """
        if spans:
            self.storage.append(self._path(SPANS_FILE), encode_row({"step": step, "spans": spans}))

    def write_checkpoint(self, record: dict[str, Any]) -> None:
        """Appends a row to ``checkpoints.jsonl``; it needs a ``name``."""
        row = CheckpointRecord.from_dict(record).to_dict()
        self.storage.append(self._path(CHECKPOINTS_FILE), encode_row(row))

    def write_rollouts(
        self, iteration: int, records: list[dict[str, Any]], base_name: str = "train"
    ) -> None:
        """Writes the rollout summaries of an iteration."""
        path = self._iteration_path(iteration, base_name + _ROLLOUTS)
        self.storage.write(path, b"".join(map(encode_row, records)))
        self._rollouts.pop(path, None)

    def write_logtree(self, iteration: int, data: dict[str, Any], base_name: str = "train") -> None:
        """Writes the tree of an iteration's log page."""
        self._write_json(self._iteration_path(iteration, base_name + _LOGTREE), data)

    def write_code_diff(self, diff: str) -> None:
        """Writes ``code.diff``."""
        self.storage.write(self._path("code.diff"), diff.encode())

    aread_config = threaded("read_config")
    aread_metrics = threaded("read_metrics")
    aread_new_metrics = threaded("read_new_metrics")
    aread_rollouts = threaded("read_rollouts")
    aread_checkpoints = threaded("read_checkpoints")
    aread_timing = threaded("read_timing")
    aread_logtree = threaded("read_logtree")
    awrite_metrics = threaded("write_metrics")
    awrite_checkpoint = threaded("write_checkpoint")
