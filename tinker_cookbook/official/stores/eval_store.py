"""Evaluations of several models in one folder; ``eval.run.answers`` describes and writes its files.

``run_dir`` is the ``save_dir`` of ``run_benchmarks``.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tinker_cookbook.eval.run.answers import (
    KEYS,
    METADATA,
    RESULT,
    SUMMARY,
    TRAJECTORIES,
    finished_benchmarks,
    latest_key,
    load_result,
    load_summary,
    load_trajectories,
    read_json,
    record_run,
    record_scores,
    update_summary,
    write_json,
)
from tinker_cookbook.eval.run.types import BenchmarkResult, StoredTrajectory
from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.official.stores.storage import LocalStorage, Storage, storage_join, threaded
from tinker_cookbook.run.jsonl import append_row

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
    """Store of evaluations in a folder.

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
        self._runs = storage_or_path.path(storage_join(prefix, "runs"))

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
        names = checkpoint_path, checkpoint_name
        record_run(self._folder(run_id), model_name, benchmarks, *names, config)
        return run_id

    def run_dir(self, run_id: str) -> str:
        """Returns the folder of a run: the ``save_dir`` of its benchmarks."""
        return str(self._folder(run_id))

    def finalize_run(self, run_id: str) -> RunMetadata:
        """Records the scores of the benchmarks that have finished."""
        self.read_run(run_id)
        return RunMetadata.from_dict(record_scores(self._folder(run_id)))

    def list_runs(self) -> list[RunMetadata]:
        """Returns all runs, most recent first."""
        ids = [path.parent.name for path in sorted(self._runs.glob(f"*/{METADATA}"))]
        runs = map(self.read_run, filter(_ID.fullmatch, ids))
        return sorted(runs, key=lambda run: run.timestamp, reverse=True)

    def read_run(self, run_id: str) -> RunMetadata:
        """Returns a run's metadata.

        Raises:
            FileNotFoundError: There is no such run; the message names the most similar one.
        """
        found = read_json(self._folder(run_id) / METADATA)
        if found is None:
            known = [run.run_id for run in self.list_runs()]
            raise FileNotFoundError(
                f"run_id: {run_id!r} is not in {self._runs.parent}{nearest_sentence(run_id, known)}"
            )
        return RunMetadata.from_dict(found)

    def list_benchmarks(self, run_id: str) -> list[str]:
        """Returns the benchmarks with a result of a run, sorted."""
        return finished_benchmarks(self._folder(run_id))

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
        folder = self._folder(run_id) / result.name
        write_json(folder / RESULT, {**result.to_dict(), "key": latest_key(folder)})

    def write_trajectory(self, run_id: str, benchmark: str, traj: StoredTrajectory) -> None:
        """Adds an answer."""
        folder = self._folder(run_id) / benchmark
        folder.mkdir(parents=True, exist_ok=True)
        append_row(folder / TRAJECTORIES, dict(traj.to_dict()))

    def write_summary(self, run_id: str, results: dict[str, BenchmarkResult]) -> None:
        """Adds results to the summary."""
        update_summary(self.run_dir(run_id), results)

    def delete_run(self, run_id: str) -> None:
        """Deletes a run with all its answers, if there is one; files of others stay."""
        folder = self._folder(run_id)
        for names, inside in (((RESULT, TRAJECTORIES, KEYS), "*/"), ((METADATA, SUMMARY), "")):
            for file in [path for name in names for path in folder.glob(inside + name)]:
                file.unlink()
        for path in (*folder.glob("*/"), folder):
            self.storage.remove_dir(str(path))

    alist_runs = threaded("list_runs")
    aread_trajectories = threaded("read_trajectories")
    aread_result = threaded("read_result")

    def _folder(self, run_id: str) -> Path:
        # A name such as ../x must not reach the files of other runs.
        if not _ID.fullmatch(run_id):
            raise ConfigurationError(
                f"run_id: got {run_id!r}, expected letters, digits, '_', '-' and '.', and "
                "a letter, digit or '_' first"
            )
        return self._runs / run_id
