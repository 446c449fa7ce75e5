"""The training runs in folders of this machine and in cloud storage.

``tinker_cookbook.runs`` says more about runs on this machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from tinker_cookbook.exceptions import CheckpointError, DataFormatError
from tinker_cookbook.official.stores.storage import LocalStorage, Storage, storage_join
from tinker_cookbook.official.stores.training_store import ITERATION, TrainingRunStore
from tinker_cookbook.run.lock import lock_holder
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, CONFIG_FILE, METRICS_FILE, SPANS_FILE
from tinker_cookbook.run.scan import RunFolder

if TYPE_CHECKING:
    from tinker_cookbook.official.stores.eval_store import EvalStore

logger = logging.getLogger(__name__)

Status: TypeAlias = Literal["running", "completed", "idle"]
TrainingType: TypeAlias = Literal["rl", "sl", "dpo"]

# A run without a lock that can be read counts as running so long after its last row, in seconds.
_ACTIVE_SECONDS = 120
_STATUS: dict[str, Status] = {"running": "running", "finished": "completed"}
# A setting that only runs of one kind have, the most special first.
_TYPE_OF_SETTING: dict[str, TrainingType] = {"dpo_beta": "dpo", "loss_fn": "rl", "num_epochs": "sl"}


@dataclass(frozen=True)
class RunInfo:
    """What a run's folder has."""

    run_id: str
    prefix: str
    """The run's folder in its storage."""
    has_config: bool
    has_metrics: bool
    has_checkpoints: bool
    has_timing: bool
    iteration_count: int
    """Folders of iterations."""
    status: Status
    last_updated: float | None
    """Time of the last row of metrics, in seconds since 1970."""
    training_type: TrainingType | None


class RunRegistry:
    """Finds the runs of storages: a storage that is a run's folder, or the runs in its folders.

    Deeper folders are not searched, because each listing of cloud storage takes a request.

    Args:
        storages: Where to look.
        eval_prefixes: Folders in each storage that may be an ``EvalStore``.
    """

    def __init__(
        self,
        storages: list[Storage],
        eval_prefixes: tuple[str, ...] = ("eval", "eval_store", ""),
    ) -> None:
        self._storages, self._eval_prefixes = storages, eval_prefixes
        self._runs: dict[str, tuple[RunInfo, TrainingRunStore]] | None = None

    @property
    def storage_count(self) -> int:
        """Number of storages."""
        return len(self._storages)

    @property
    def primary_storage(self) -> Storage:
        """The first storage."""
        return self._storages[0]

    def storage_for(self, run_id: str) -> Storage:
        """Returns the storage of a run, the first one for an unknown run."""
        return self.get_training_store(run_id).storage

    def refresh(self) -> list[RunInfo]:
        """Looks for runs again, and forgets what was read."""
        self._runs = {}
        for storage in self._storages:
            for info, store in _runs_of(storage):
                # Runs of the same name are told apart by their storage.
                source = storage.url().rstrip("/").rpartition("/")[2]
                run_id, number = info.run_id, 1
                while run_id in self._runs:
                    run_id = f"{source}--{info.run_id}" + (f"-{number}" if number > 1 else "")
                    number += 1
                self._runs[run_id] = replace(info, run_id=run_id), store
        return self.get_runs()

    def _found(self) -> dict[str, tuple[RunInfo, TrainingRunStore]]:
        if self._runs is None:
            self.refresh()
        return self._runs or {}

    def get_runs(self) -> list[RunInfo]:
        """Returns all runs, as of the last ``refresh``."""
        return [info for info, _ in self._found().values()]

    def get_run(self, run_id: str) -> RunInfo | None:
        """Returns a run, ``None`` if there is none of that name."""
        found = self._found().get(run_id)
        return found and found[0]

    def get_training_store(self, run_id: str) -> TrainingRunStore:
        """Returns the store of a run; that of the first storage for an unknown run."""
        found = self._found().get(run_id)
        return found[1] if found else TrainingRunStore(self.primary_storage)

    def get_eval_store(self) -> EvalStore | None:
        """Returns the first ``EvalStore`` in the storages, if there is one."""
        # Imported here, because it imports all benchmarks.
        from tinker_cookbook.official.stores.eval_store import EvalStore

        for storage in self._storages:
            for prefix in self._eval_prefixes:
                if storage.exists(storage_join(prefix, "runs.jsonl")):
                    return EvalStore(storage, prefix)
        return None


def _runs_of(storage: Storage) -> Iterator[tuple[RunInfo, TrainingRunStore]]:
    names = storage.list_dir("")
    if _is_run(names):
        yield _run_info(storage, "root", "", names)
        return
    for child in names:
        if _is_run(files := storage.list_dir(child)):
            yield _run_info(storage, child, child, files)


def _is_run(names: list[str]) -> bool:
    return METRICS_FILE in names or CONFIG_FILE in names


def _run_info(
    storage: Storage, run_id: str, prefix: str, names: list[str]
) -> tuple[RunInfo, TrainingRunStore]:
    store = TrainingRunStore(storage, prefix)
    stat = storage.stat(storage_join(prefix, METRICS_FILE))
    last_updated = None if stat is None else stat.mtime
    local = isinstance(storage, LocalStorage)
    found = RunFolder(Path(prefix), holder=lock_holder(storage.path(prefix)) if local else None)
    try:
        found = replace(
            found,
            config=store.read_config() or {},
            rows=store.read_metrics()[-1:],
            checkpoints=store.read_checkpoint_records(),
        )
    except (DataFormatError, CheckpointError) as error:  # the other runs are listed nevertheless
        logger.warning("%s", error)
    recent = last_updated is not None and time.time() - last_updated < _ACTIVE_SECONDS
    other: Status = "running" if recent else "idle"
    settings = found.config
    info = RunInfo(
        run_id=run_id,
        prefix=prefix,
        has_config=CONFIG_FILE in names,
        has_metrics=METRICS_FILE in names,
        has_checkpoints=CHECKPOINTS_FILE in names,
        has_timing=SPANS_FILE in names,
        iteration_count=sum(ITERATION.fullmatch(name) is not None for name in names),
        status=_STATUS.get(found.state, other),
        last_updated=last_updated,
        training_type=next((t for name, t in _TYPE_OF_SETTING.items() if name in settings), None),
    )
    return info, store
