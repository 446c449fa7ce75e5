"""Checkpoint store of one owner of a server, with read access to published checkpoints of
others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tinker_cookbook.engine.checkpoints import files
from tinker_cookbook.engine.checkpoints.format import Kind, TinkerPath
from tinker_cookbook.engine.checkpoints.store import (
    CheckpointInfo,
    CheckpointStore,
    LoadedCheckpoint,
    RunInfo,
    RunRecord,
)
from tinker_cookbook.engine.model.loading import size_text
from tinker_cookbook.exceptions import CheckpointError

_SHOWN_METADATA = ("renderer_name", "recipe")
"""Metadata of a run that other owners may see; the rest may contain paths and names."""


class OwnerStore(CheckpointStore):
    """A checkpoint store that looks up published checkpoints in the stores of other owners.

    A run of another owner shows only its published checkpoints. Reading works as for a checkpoint
    of this owner; writing, deleting and publishing are refused.
    """

    others: Sequence[OwnerStore] = ()
    """Stores of the other owners."""
    quota_bytes: int | None = None
    """Most bytes on disk of this owner's runs; None: no limit."""

    def used_bytes(self) -> int:
        """Returns the size of all files of this owner's runs."""
        used = 0
        for folder, _, names in os.walk(self.root / "runs"):
            for name in names:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    used += os.stat(os.path.join(folder, name)).st_size
        return used

    def write_checkpoint(self, run_id: str, kind: Kind, name: str, **content: Any) -> str:
        """Saves a checkpoint; see ``CheckpointStore.write_checkpoint``.

        Raises ``CheckpointError`` before anything is written if it would exceed the quota.
        """
        if self.quota_bytes is not None:
            tensors = {**content["adapter"], **(content.get("optimizer") or {})}
            self._check_quota(TinkerPath(run_id, kind, name), self.quota_bytes, tensors)
        return super().write_checkpoint(run_id, kind, name, **content)

    def _check_quota(self, path: TinkerPath, quota: int, tensors: Mapping[str, Tensor]) -> None:
        needed, used = sum(tensor.nbytes for tensor in tensors.values()), self.used_bytes()
        if used + needed <= quota:
            return
        self.expire()
        listed = super().list_checkpoints
        found = [one for run in self.run_ids() for one in listed(run)]
        # A checkpoint of the same name is replaced.
        used = self.used_bytes() - sum(one.size_bytes for one in found if one.path == path)
        if used + needed <= quota:
            return
        largest = max(found, key=lambda one: one.size_bytes, default=None)
        example = "" if largest is None else f" {largest.path} ({size_text(largest.size_bytes)})"
        raise CheckpointError(
            f"saving {path}: needs {size_text(needed)}, and {self.owner!r} already uses "
            f"{size_text(used)} of {size_text(quota)} on this server's disk (its operator's "
            "disk_quota_gb=). Delete checkpoints that you no longer need, for example `tinker "
            f"checkpoint delete{example}`; `tinker checkpoint list` shows all"
        )

    def get_run(self, run_id: str) -> RunRecord:
        """Returns a run of this owner, or one with a published checkpoint."""
        store = self._publisher(run_id)
        if store is None:
            return super().get_run(run_id)
        record = CheckpointStore.get_run(store, run_id)
        return replace(record, info=_shown(record.info))

    def list_checkpoints(self, run_id: str) -> list[CheckpointInfo]:
        """Returns the checkpoints of a run; of another owner's run, the published ones."""
        store = self._publisher(run_id)
        if store is None:
            return super().list_checkpoints(run_id)
        return [replace(info, user_metadata={}) for info in store.public_checkpoints(run_id)]

    def get_checkpoint(self, tinker_path: str) -> CheckpointInfo:
        """Returns the entry of one checkpoint."""
        with self._reading_from(tinker_path) as store:
            return CheckpointStore.get_checkpoint(store, tinker_path)

    def read_checkpoint(self, tinker_path: str, *, with_optimizer: bool) -> LoadedCheckpoint:
        """Loads a checkpoint; see ``CheckpointStore.read_checkpoint``."""
        with self._reading_from(tinker_path) as store:
            return CheckpointStore.read_checkpoint(
                store, tinker_path, with_optimizer=with_optimizer
            )

    def peft_files(self, tinker_path: str) -> dict[str, bytes]:
        """Returns, by name, the files that ``PeftModel.from_pretrained`` needs."""
        with self._reading_from(tinker_path) as store:
            return CheckpointStore.peft_files(store, tinker_path)

    def archive(self, tinker_path: str) -> Path:
        """Writes a tar file with ``peft_files`` into the store that has the checkpoint."""
        with self._reading_from(tinker_path) as store:
            return CheckpointStore.archive(store, tinker_path)

    def public_checkpoints(self, run_id: str) -> list[CheckpointInfo]:
        """Returns the published, undamaged checkpoints of a run of this owner."""
        found = CheckpointStore.list_checkpoints(self, run_id)
        return [info for info in found if info.public and info.problem is None]

    def published_by_others(self) -> Iterator[tuple[str, CheckpointInfo, RunInfo]]:
        """Yields owner, checkpoint and run of all published checkpoints of other owners."""
        for store in self.others:
            for run in store.list_runs():
                for info in reversed(store.public_checkpoints(run.run_id)):
                    yield store.owner or "", info, _shown(run.info)

    @contextmanager
    def _reading_from(self, tinker_path: str) -> Iterator[OwnerStore]:
        """Yields the store of another owner if it publishes the checkpoint, else this one."""
        path = TinkerPath.parse(tinker_path)
        store = self._publisher(path.run_id)
        if store is None:
            yield self
            return
        # A private checkpoint of the run gives the same error as a missing one.
        if not any(info.path == path for info in store.public_checkpoints(path.run_id)):
            raise CheckpointError(
                f"{path}: its owner has not published it, or it has expired or been deleted"
            )
        try:
            yield store
        except CheckpointError as error:
            # Keep only the first sentence: the others name private checkpoints of the run.
            raise CheckpointError(str(error).partition(". ")[0]) from None

    def _publisher(self, run_id: str) -> OwnerStore | None:
        """Returns the store of another owner that has a published checkpoint of the run."""
        if self._has_run(run_id):
            return None
        for store in self.others:
            with suppress(CheckpointError):
                if store._has_run(run_id) and store.public_checkpoints(run_id):
                    return store
        return None

    def _has_run(self, run_id: str) -> bool:
        return self._run_folder(run_id).exists()

    @contextmanager
    def _writing(
        self, path: TinkerPath, doing: str, timeout: float = files.LOCK_TIMEOUT
    ) -> Iterator[None]:
        if self._publisher(path.run_id) is not None:
            raise CheckpointError(
                f"{doing} {path}: it belongs to another owner, and only the owner may do that"
            )
        with super()._writing(path, doing, timeout):
            yield


def _shown(info: RunInfo) -> RunInfo:
    metadata = {k: v for k, v in info.user_metadata.items() if k in _SHOWN_METADATA}
    return replace(info, user_metadata=metadata)
