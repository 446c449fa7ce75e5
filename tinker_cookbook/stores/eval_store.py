"""Evaluations of several models in one folder.

``runs.jsonl`` lists the runs. ``runs/ID/metadata.json`` has a run's model, settings and scores;
``runs/ID/TASK/`` its results and answers, and ``runs/ID/summary.json`` all results. ``run_dir`` is
the ``save_dir`` of ``run_benchmarks``.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tinker_cookbook.eval.benchmarks import (
    BenchmarkResult,
    StoredTrajectory,
    load_result,
    load_summary,
    load_trajectories,
)
from tinker_cookbook.eval.benchmarks._files import (
    KEYS,
    RESULT,
    SUMMARY,
    TRAJECTORIES,
    latest_key,
    update_summary,
    write_json,
)
from tinker_cookbook.exceptions import ConfigurationError, DataError, nearest_sentence
from tinker_cookbook.run.jsonl import append_row
from tinker_cookbook.stores.storage import LocalStorage, Storage, storage_join, threaded

_METADATA = "metadata.json"
_ID = re.compile(r"[\w][\w.-]*")


@dataclass
class RunMetadata:
    """Model, settings and scores of one evaluation run."""

    run_id: str
    model_name: str
    checkpoint_path: str | None
    checkpoint_name: str | None
    benchmarks: list[str]
    timestamp: str
    """Start, as ISO 8601 in UTC."""
    config: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    """Benchmark -> score, for benchmarks that have finished."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> RunMetadata:
        """Returns the metadata of a JSON object; unknown fields are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in d.items() if name in known})


class RunNotFoundError(DataError, FileNotFoundError):
    """There is no run of this id."""


class EvalStore:
    """Store of evaluations in a folder; the module docstring describes the files.

    Args:
        storage_or_path: Folder on this machine, or a ``LocalStorage``.
        prefix: Folder inside the storage.

    Raises:
        ConfigurationError: The storage is not on this machine.
    """

    def __init__(self, storage_or_path: Storage | str | os.PathLike[str], prefix: str = "") -> None:
        if isinstance(storage_or_path, (str, os.PathLike)):
            storage_or_path = LocalStorage(storage_or_path)
        if not isinstance(storage_or_path, LocalStorage):
            raise ConfigurationError(
                f"storage_or_path: got {storage_or_path.url(prefix)}, expected a folder on this "
                "machine: evaluations are written and read there; copy the folder first"
            )
        self.storage, self.prefix = storage_or_path, prefix

    def url(self, path: str = "") -> str:
        """Returns the ``file://`` address of a file of the store."""
        return self.storage.url(storage_join(self.prefix, path))

    def create_run(
        self,
        model_name: str,
        benchmarks: list[str],
        checkpoint_path: str | None = None,
        checkpoint_name: str | None = None,
        config: dict[str, Any] | None = None,
        run_id: str | None = None,
    ) -> str:
        """Records a run and returns its id; continues an existing ``run_id``."""
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        label = "" if checkpoint_name is None else re.sub(r"[^\w.-]", "_", checkpoint_name) + "-"
        run_id = run_id or f"{label}{now}-{uuid.uuid4().hex[:6]}"
        known = self.storage.exists(self._path(run_id, _METADATA))
        if known:
            before = self.read_run(run_id)
            benchmarks = list(dict.fromkeys([*before.benchmarks, *benchmarks]))
        metadata = RunMetadata(
            run_id,
            model_name,
            checkpoint_path,
            checkpoint_name,
            list(benchmarks),
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            dict(config or {}),
        )
        self._write_metadata(metadata)
        if not known:
            row = {"run_id": run_id, "model_name": model_name, "timestamp": metadata.timestamp}
            append_row(self._local("runs.jsonl"), row)
        return run_id

    def run_dir(self, run_id: str) -> str:
        """Returns the folder of a run: the ``save_dir`` of its benchmarks."""
        return str(self.storage.path(self._path(run_id)))

    def finalize_run(self, run_id: str) -> RunMetadata:
        """Records the scores of the benchmarks that have finished."""
        metadata = self.read_run(run_id)
        found = {name: self.read_result(run_id, name) for name in self.list_benchmarks(run_id)}
        metadata.scores = {name: result.score for name, result in found.items() if result}
        self._write_metadata(metadata)
        return metadata

    def list_runs(self) -> list[RunMetadata]:
        """Returns all runs, most recent first."""
        names = self.storage.list_dir(storage_join(self.prefix, "runs"))
        ids = filter(_ID.fullmatch, names)
        there = [i for i in ids if self.storage.exists(self._path(i, _METADATA))]
        return sorted(map(self.read_run, there), key=lambda run: run.timestamp, reverse=True)

    def read_run(self, run_id: str) -> RunMetadata:
        """Returns a run's metadata.

        Raises:
            RunNotFoundError: There is no such run; the message names the most similar one.
        """
        path = self._path(run_id, _METADATA)
        if not self.storage.exists(path):
            known = [run.run_id for run in self.list_runs()]
            raise RunNotFoundError(
                f"run_id: {run_id!r} is not in {self._local()}{nearest_sentence(run_id, known)}"
            )
        return RunMetadata.from_dict(json.loads(self.storage.read(path)))

    def list_benchmarks(self, run_id: str) -> list[str]:
        """Returns the benchmarks with a result of a run, sorted."""
        names = self.storage.list_dir(self._path(run_id))
        return [name for name in names if self.storage.exists(self._path(run_id, name, RESULT))]

    def read_result(self, run_id: str, benchmark: str) -> BenchmarkResult | None:
        """Returns a result; ``None`` if the benchmark has not finished."""
        return load_result(self.run_dir(run_id), benchmark)

    def read_trajectories(
        self,
        run_id: str,
        benchmark: str,
        *,
        correct_only: bool = False,
        incorrect_only: bool = False,
        errors_only: bool = False,
    ) -> list[StoredTrajectory]:
        """Returns stored answers, see ``load_trajectories``."""
        return load_trajectories(
            self.run_dir(run_id), benchmark, correct_only, incorrect_only, errors_only
        )

    def read_single_trajectory(
        self, run_id: str, benchmark: str, idx: int
    ) -> StoredTrajectory | None:
        """Returns the first answer to the problem at position ``idx``, if any."""
        rows = self.read_trajectories(run_id, benchmark)
        return next((row for row in rows if row.idx == idx), None)

    def read_summary(self, run_id: str) -> dict[str, Any] | None:
        """Returns the results of all benchmarks; ``None`` if no benchmark has finished."""
        return load_summary(self.run_dir(run_id)) or None

    def write_result(self, run_id: str, result: BenchmarkResult) -> None:
        """Writes a result."""
        folder = Path(self.run_dir(run_id)) / result.name
        write_json(folder / RESULT, {**result.to_dict(), "key": latest_key(folder)})

    def write_trajectory(self, run_id: str, benchmark: str, traj: StoredTrajectory) -> None:
        """Adds an answer."""
        folder = Path(self.run_dir(run_id)) / benchmark
        folder.mkdir(parents=True, exist_ok=True)
        append_row(folder / TRAJECTORIES, dict(traj.to_dict()))

    def write_summary(self, run_id: str, results: dict[str, BenchmarkResult]) -> None:
        """Adds results to the summary."""
        update_summary(self.run_dir(run_id), results)

    def delete_run(self, run_id: str) -> None:
        """Deletes a run with all its answers, if there is one; files of others stay."""
        folder = self._path(run_id)
        names = self.storage.list_dir(folder)
        ours = {RESULT, TRAJECTORIES, KEYS}
        for path in (storage_join(folder, name) for name in names):
            for file in ours.intersection(self.storage.list_dir(path)):
                self.storage.remove(storage_join(path, file))
            self.storage.remove_dir(path)
        for file in {_METADATA, SUMMARY}.intersection(names):
            self.storage.remove(storage_join(folder, file))
        self.storage.remove_dir(folder)

    alist_runs = threaded("list_runs")
    aread_trajectories = threaded("read_trajectories")
    aread_result = threaded("read_result")

    def _path(self, run_id: str, *parts: str) -> str:
        # A name such as ../x must not reach the files of other runs.
        if not _ID.fullmatch(run_id):
            raise ConfigurationError(
                f"run_id: got {run_id!r}, expected letters, digits, '_', '-' and '.', and "
                "a letter, digit or '_' first"
            )
        return storage_join(self.prefix, "runs", run_id, *parts)

    def _local(self, *parts: str) -> Path:
        return self.storage.path(storage_join(self.prefix, *parts))

    def _write_metadata(self, metadata: RunMetadata) -> None:
        text = json.dumps(metadata.to_dict(), indent=2, ensure_ascii=False)
        self.storage.write(self._path(metadata.run_id, _METADATA), (text + "\n").encode())
