"""Evaluations of several models in one folder.

``runs.jsonl`` lists the runs. ``runs/ID/metadata.json`` has a run's model, settings and scores;
``runs/ID/TASK/`` its results and answers, and ``runs/ID/summary.json`` all results. ``run_dir`` is
the ``save_dir`` of ``run_benchmarks``.
"""

from __future__ import annotations

import asyncio
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
    RESULT,
    TRAJECTORIES,
    latest_key,
    update_summary,
    write_json,
)
from tinker_cookbook.exceptions import ConfigurationError, DataError, nearest_sentence
from tinker_cookbook.stores.storage import LocalStorage, storage_join
from tinker_cookbook.utils.run_folder.jsonl import append_row, read_rows

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


class EvalStore:
    """Store of evaluations in a folder; the module docstring describes the files.

    Args:
        storage_or_path: Folder on this machine, or a ``LocalStorage``.
        prefix: Folder inside the storage.
    """

    def __init__(
        self, storage_or_path: LocalStorage | str | os.PathLike[str], prefix: str = ""
    ) -> None:
        is_storage = isinstance(storage_or_path, LocalStorage)
        self._storage = storage_or_path if is_storage else LocalStorage(storage_or_path)
        self._prefix = prefix

    def url(self, path: str = "") -> str:
        """Returns the path of a file of the store."""
        return self._storage.url(storage_join(self._prefix, path))

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
        run_id = run_id or f"{now}-{uuid.uuid4().hex[:6]}"
        if not _ID.fullmatch(run_id):
            raise ConfigurationError(
                f"run_id: got {run_id!r}, expected letters, digits, '_', '-' and '.', and "
                "a letter, digit or '_' first"
            )
        known = self._storage.exists(self._path(run_id, "metadata.json"))
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
            append_row(self.url("runs.jsonl"), row)
        return run_id

    def run_dir(self, run_id: str) -> str:
        """Returns the folder of a run: the ``save_dir`` of its benchmarks."""
        return self.url(f"runs/{run_id}")

    def finalize_run(self, run_id: str) -> RunMetadata:
        """Records the scores of the benchmarks that have finished."""
        metadata = self.read_run(run_id)
        found = {name: self.read_result(run_id, name) for name in self.list_benchmarks(run_id)}
        metadata.scores = {name: result.score for name, result in found.items() if result}
        self._write_metadata(metadata)
        return metadata

    def list_runs(self) -> list[RunMetadata]:
        """Returns all runs except deleted ones, oldest first."""
        ids = dict.fromkeys(str(row["run_id"]) for row in read_rows(self.url("runs.jsonl")))
        there = [i for i in ids if self._storage.exists(self._path(i, "metadata.json"))]
        return [self.read_run(run_id) for run_id in there]

    def read_run(self, run_id: str) -> RunMetadata:
        """Returns a run's metadata.

        Raises:
            DataError: there is no such run; the message names the most similar one.
        """
        path = self._path(run_id, "metadata.json")
        if not self._storage.exists(path):
            known = self._storage.list_dir(storage_join(self._prefix, "runs"))
            raise DataError(
                f"run_id: {run_id!r} is not in {self.url()}{nearest_sentence(run_id, known)}"
            )
        return RunMetadata.from_dict(json.loads(self._storage.read(path)))

    def list_benchmarks(self, run_id: str) -> list[str]:
        """Returns the benchmarks with answers or a result of a run, sorted."""
        names = self._storage.list_dir(self._path(run_id))
        files = (RESULT, TRAJECTORIES)
        return [
            name
            for name in names
            if any(self._storage.exists(self._path(run_id, name, file)) for file in files)
        ]

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
        """Deletes a run with all its answers."""
        self.read_run(run_id)  # raises for an unknown run
        self._storage.remove_dir(self._path(run_id))

    async def alist_runs(self) -> list[RunMetadata]:
        """Runs ``list_runs`` in a thread."""
        return await asyncio.to_thread(self.list_runs)

    async def aread_trajectories(
        self, run_id: str, benchmark: str, **kw: Any
    ) -> list[StoredTrajectory]:
        """Runs ``read_trajectories`` in a thread."""
        return await asyncio.to_thread(self.read_trajectories, run_id, benchmark, **kw)

    async def aread_result(self, run_id: str, benchmark: str) -> BenchmarkResult | None:
        """Runs ``read_result`` in a thread."""
        return await asyncio.to_thread(self.read_result, run_id, benchmark)

    def _path(self, run_id: str, *parts: str) -> str:
        return storage_join(self._prefix, "runs", run_id, *parts)

    def _write_metadata(self, metadata: RunMetadata) -> None:
        text = json.dumps(metadata.to_dict(), indent=2, ensure_ascii=False)
        self._storage.write(self._path(metadata.run_id, "metadata.json"), (text + "\n").encode())
