"""Checkpoints on disk: ``<root>/runs/RUN/weights/NAME`` and ``.../sampler_weights/NAME``.

The store takes and returns tensors under PEFT's names and JSON values; it does not depend on
models.
Guarantees: a checkpoint is written atomically, even if the process is killed; a damaged one is
refused with the file, its size and a remedy; several processes may use one store.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tinker_cookbook.engine.checkpoints import files
from tinker_cookbook.engine.checkpoints import format as fmt
from tinker_cookbook.engine.checkpoints.paths import (
    KINDS,
    Kind,
    TinkerPath,
    is_safe_name,
)
from tinker_cookbook.engine.checkpoints.runs import RunInfo, RunRecord, RunStore, some_of
from tinker_cookbook.exceptions import CheckpointError, nearest

__all__ = [
    "CheckpointInfo",
    "CheckpointStore",
    "Kind",
    "LoadedCheckpoint",
    "RunInfo",
    "RunRecord",
    "TinkerPath",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Content of a checkpoint: the arguments of ``write_checkpoint``."""

    path: TinkerPath
    adapter: dict[str, torch.Tensor]
    adapter_config: dict[str, Any]
    optimizer: dict[str, torch.Tensor] | None
    """``None`` unless requested."""
    state: dict[str, Any]
    user_metadata: dict[str, str]


@dataclass(frozen=True)
class CheckpointInfo:
    """Entry of a listing. Times are seconds since the epoch."""

    path: TinkerPath
    created_at: float
    expires_at: float | None
    size_bytes: int
    user_metadata: dict[str, str]
    problem: str | None
    """Damage visible from the file sizes; ``None`` if there is none."""


class CheckpointStore(RunStore):
    """Runs and their checkpoints under one root.

    Opening it removes leftovers of crashed writers and expired checkpoints, except in runs that
    another process is writing to.
    """

    def _opened(self) -> None:
        self._recover_all()
        self.expire()

    def write_checkpoint(
        self,
        run_id: str,
        kind: Kind,
        name: str,
        *,
        adapter: Mapping[str, torch.Tensor],
        adapter_config: Mapping[str, Any],
        optimizer: Mapping[str, torch.Tensor] | None = None,
        state: Mapping[str, Any] | None = None,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Saves a checkpoint durably.

        Args:
            run_id: a run that ``create_run`` registered.
            kind: ``weights`` or ``sampler_weights``; the latter takes no ``optimizer``.
            name: of the checkpoint within its run and kind.
            adapter: tensors under PEFT's names; equal tensors give equal bytes on disk.
            adapter_config: content of PEFT's ``adapter_config.json``.
            optimizer: optimizer tensors, or ``None``.
            state: JSON values to restore (step, RNG, versions).
            ttl_seconds: seconds until it expires; ``None``: never.
            overwrite: replaces an existing checkpoint of this name atomically.
            user_metadata: stored and listed, not interpreted.

        Returns:
            ``tinker://RUN/KIND/NAME``.

        Raises:
            CheckpointError: the name is taken or unsafe, the run unknown, the disk full.
        """
        path = TinkerPath(run_id, kind, name)
        if kind == "sampler_weights" and optimizer is not None:
            raise CheckpointError(f"{path}: got an optimizer state, expected kind 'weights' for it")
        contents = {
            fmt.ADAPTER_CONFIG: partial(fmt.encode_json, adapter_config, "adapter_config", 2),
            fmt.ADAPTER: partial(fmt.encode_tensors, adapter),
        }
        if optimizer is not None:
            contents[fmt.OPTIMIZER] = partial(fmt.encode_tensors, optimizer)
        now = self.clock()
        content = chain(
            fmt.encode_expiry(fmt.deadline(now, ttl_seconds)),
            fmt.encode_checkpoint(contents, state or {}, user_metadata or {}, now),
        )
        self.touch_run(run_id)
        folder = self._folder(path)
        with files.explain_disk_errors(f"saving {path}", self.root), self._writing(path):
            if folder.exists() and not overwrite and not self._is_expired(folder):
                raise CheckpointError(
                    f"{path}: there is a checkpoint of this name. Choose another name, pass "
                    "overwrite=True, or delete it."
                )
            files.replace_folder(folder, content)
            self._archive_file(path).unlink(missing_ok=True)
        return str(path)

    def read_checkpoint(self, tinker_path: str, *, with_optimizer: bool) -> LoadedCheckpoint:
        """Loads a checkpoint and verifies all checksums.

        Raises:
            CheckpointError: it is missing, expired, truncated or damaged (with file, size and
                expected size), or lacks a requested optimizer state.
        """
        path = TinkerPath.parse(tinker_path)
        if with_optimizer and path.kind == "sampler_weights":
            raise CheckpointError(
                f"{path}: sampler_weights hold the adapter alone, no optimizer state. Load it "
                "without optimizer, or give a path of save_state. "
                + some_of("The run has weights", self._names(path.run_id, "weights"))
            )
        with self._reading(path) as folder:
            state = fmt.read_state(folder)
            if with_optimizer and fmt.OPTIMIZER not in state.seals:
                raise CheckpointError(
                    f"{path}: was saved without optimizer state. Load it without optimizer"
                )
            optimizer = None
            if with_optimizer:
                optimizer = fmt.decode_tensors(fmt.read_sealed(folder, fmt.OPTIMIZER, state))
            return LoadedCheckpoint(
                path=path,
                adapter=fmt.decode_tensors(fmt.read_sealed(folder, fmt.ADAPTER, state)),
                adapter_config=json.loads(fmt.read_sealed(folder, fmt.ADAPTER_CONFIG, state)),
                optimizer=optimizer,
                state=state.state,
                user_metadata=state.user_metadata,
            )

    def get_checkpoint(self, tinker_path: str) -> CheckpointInfo:
        """Returns the entry of one checkpoint; raises ``CheckpointError`` if it does not exist."""
        path = TinkerPath.parse(tinker_path)
        with self._reading(path):
            return self._describe(path)

    def list_checkpoints(self, run_id: str) -> list[CheckpointInfo]:
        """Returns the checkpoints of a run, oldest first, without expired ones."""
        self.get_run(run_id)
        with files.folder_lock(self.run_folder(run_id), exclusive=False):
            found = [
                self._describe(path)
                for path in self._paths(run_id)
                if not self._is_expired(self._folder(path))
            ]
        return sorted(found, key=lambda info: (info.created_at, str(info.path)))

    def delete_checkpoint(self, tinker_path: str) -> None:
        """Deletes a checkpoint permanently, damaged or not."""
        path = TinkerPath.parse(tinker_path)
        with files.explain_disk_errors(f"deleting {path}", self.root), self._writing(path):
            if not self._folder(path).exists():
                raise self._missing(path)
            self._delete(path)

    def set_ttl(self, tinker_path: str, ttl_seconds: int | None) -> None:
        """Sets the expiry to ``ttl_seconds`` from now; ``None``: never."""
        path = TinkerPath.parse(tinker_path)
        folder = self._folder(path)
        deadline = fmt.deadline(self.clock(), ttl_seconds)
        with (
            files.explain_disk_errors(f"setting the TTL of {path}", self.root),
            self._writing(path),
        ):
            if not folder.exists() or self._is_expired(folder):
                raise self._missing(path)
            if deadline is None:
                (folder / fmt.EXPIRES_AT).unlink(missing_ok=True)
                files.sync_folder(folder)
            for name, content in fmt.encode_expiry(deadline):
                files.replace_file(folder / name, content)

    def expire(self, now: float | None = None) -> list[str]:
        """Deletes the checkpoints that expire at or before ``now`` and returns their paths.

        Runs that another process is writing to are skipped until the next call.
        """
        expired = []
        for path in chain.from_iterable(map(self._paths, self.run_ids())):
            if not self._is_expired(self._folder(path), now):
                continue
            with suppress(CheckpointError, OSError), self._writing(path, timeout=0):
                if self._is_expired(self._folder(path), now):
                    self._delete(path)
                    expired.append(str(path))
                    logger.info("Deleted %s, which expired", path)
        return expired

    def copy_out(self, tinker_path: str, folder: Path) -> Path:
        """Copies the adapter into a new folder that ``PeftModel.from_pretrained`` loads.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or ``folder`` is not empty.
        """
        path, folder = TinkerPath.parse(tinker_path), Path(folder).expanduser().absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder}: expected a new or empty folder to copy {path} into")
        with self._reading(path) as source:
            content = fmt.read_peft_files(source)
        with files.explain_disk_errors(f"copying {path} to {folder}", folder.parent):
            files.replace_folder(folder, content)
        return folder

    def peft_files(self, tinker_path: str) -> dict[str, bytes]:
        """Returns the files that ``copy_out`` copies, by name."""
        with self._reading(TinkerPath.parse(tinker_path)) as source:
            return dict(fmt.read_peft_files(source))

    def archive(self, tinker_path: str) -> Path:
        """Writes a tar file with the files of ``copy_out`` into the store and returns its path.

        It is deleted with the checkpoint.
        """
        path = TinkerPath.parse(tinker_path)
        target = self._archive_file(path)
        with self._reading(path) as source:
            content = fmt.tar(fmt.read_peft_files(source))
        with files.explain_disk_errors(f"archiving {path}", self.root), self._writing(path):
            if not self._folder(path).exists():
                raise self._missing(path)
            target.parent.mkdir(exist_ok=True)
            files.replace_file(target, content)
        return target

    def _describe(self, path: TinkerPath) -> CheckpointInfo:
        folder = self._folder(path)
        problem, state = None, None
        try:
            state = fmt.read_state(folder)
            fmt.check_sizes(folder, state)
        except CheckpointError as error:
            problem = self._shown(str(error))
        return CheckpointInfo(
            path=path,
            created_at=state.created_at if state else folder.stat().st_mtime,
            expires_at=fmt.read_expiry(folder),
            size_bytes=state.size_bytes if state else 0,
            user_metadata=state.user_metadata if state else {},
            problem=problem,
        )

    def _delete(self, path: TinkerPath) -> None:
        files.delete_folder(self._folder(path))
        self._archive_file(path).unlink(missing_ok=True)

    @contextmanager
    def _writing(self, path: TinkerPath, timeout: float = files.LOCK_TIMEOUT) -> Iterator[None]:
        """Holds the run's exclusive lock, after recovery from crashed writers."""
        self.get_run(path.run_id)
        run = self.run_folder(path.run_id)
        with files.folder_lock(run, exclusive=True, timeout=timeout):
            files.recover(self._folder(path).parent)
            yield

    @contextmanager
    def _reading(self, path: TinkerPath) -> Iterator[Path]:
        """Yields the checkpoint's folder under the shared lock; errors state a remedy."""
        folder = self._folder(path)
        if not self.run_folder(path.run_id).exists():
            raise self._missing(path)
        # Without the lock nothing is known: a living writer looks like one that crashed.
        if not folder.exists() and files.leftovers(folder.parent):
            with files.explain_disk_errors(f"recovering {path}", self.root), self._writing(path):
                pass
        with files.folder_lock(self.run_folder(path.run_id), exclusive=False):
            if not folder.exists():
                raise self._missing(path)
            if self._is_expired(folder):
                raise CheckpointError(
                    f"{path}: expired at {_utc(fmt.read_expiry(folder))}. {self._others(path)}"
                )
            try:
                yield folder
            except CheckpointError as error:
                raise CheckpointError(f"{self._shown(str(error))}. {self._others(path)}") from error

    def _missing(self, path: TinkerPath) -> CheckpointError:
        if path.run_id not in self.run_ids():
            return self._unknown_run(path.run_id)
        hint = nearest(path.name, self._names(path.run_id, path.kind))
        for kind in KINDS:
            if kind != path.kind and path.name in self._names(path.run_id, kind):
                hint = f"; its {kind} have this name: {TinkerPath(path.run_id, kind, path.name)}"
        return CheckpointError(f"{path}: there is no such checkpoint{hint}. {self._others(path)}")

    def _others(self, path: TinkerPath) -> str:
        names = [name for name in self._names(path.run_id, path.kind) if name != path.name]
        return some_of(f"Other {path.kind} of this run to load instead", names)

    def _recover_all(self) -> None:
        for run in (self.root / "runs").glob("*/"):
            parents = [run, run / "archives", *(run / kind for kind in KINDS)]
            if not any(files.leftovers(parent) for parent in parents):
                continue
            # A busy lock means that what looks left over is being written right now.
            with (
                suppress(CheckpointError, OSError),
                files.folder_lock(run, exclusive=True, timeout=0),
            ):
                for parent in parents:
                    files.recover(parent)

    def _paths(self, run_id: str) -> list[TinkerPath]:
        return [TinkerPath(run_id, kind, n) for kind in KINDS for n in self._names(run_id, kind)]

    def _names(self, run_id: str, kind: Kind) -> list[str]:
        try:
            with os.scandir(self.run_folder(run_id) / kind) as entries:
                return sorted(e.name for e in entries if e.is_dir() and is_safe_name(e.name))
        except FileNotFoundError:
            return []

    def _folder(self, path: TinkerPath) -> Path:
        return self.run_folder(path.run_id) / path.kind / path.name

    def _archive_file(self, path: TinkerPath) -> Path:
        return self.run_folder(path.run_id) / "archives" / f"{path.kind}.{path.name}.tar"

    def _is_expired(self, folder: Path, now: float | None = None) -> bool:
        expires_at = fmt.read_expiry(folder)
        return expires_at is not None and expires_at <= (self.clock() if now is None else now)


def _utc(seconds: float | None) -> str:
    return (
        "?" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
    )
