"""Runs and their checkpoints on disk.

A run is a folder ``<root>/runs/RUN`` with a ``run.json``; its checkpoints are the folders
``weights/NAME`` and ``sampler_weights/NAME`` in it, written ``tinker://RUN/weights/NAME``. The
store takes and returns tensors under PEFT's names and JSON values; it does not depend on models.

Guarantees: a checkpoint is written atomically, even if the process is killed; a damaged checkpoint
is refused with the file, its size and a remedy; several processes may use one store.
"""

from __future__ import annotations

import io
import json
import logging
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from tinker_cookbook.engine.checkpoints import files
from tinker_cookbook.engine.checkpoints import format as fmt
from tinker_cookbook.engine.checkpoints.format import KINDS, Kind, TinkerPath, check_name
from tinker_cookbook.engine.home import home_dir
from tinker_cookbook.exceptions import (
    CheckpointError,
    CheckpointNotFoundError,
    nearest,
    nearest_sentence,
    some_of,
)

logger = logging.getLogger(__name__)
_RUN = "run.json"


@dataclass(frozen=True)
class RunInfo:
    """Base model and adapter shape of a run."""

    base_model: str
    lora_rank: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    train_vision: bool = False
    seed: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """A run of the store. Times are seconds since the epoch."""

    run_id: str
    info: RunInfo
    created_at: float
    last_used_at: float


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Content of a checkpoint, as passed to ``write_checkpoint``."""

    path: TinkerPath
    adapter: dict[str, Tensor]
    adapter_config: dict[str, Any]
    optimizer: dict[str, Tensor] | None
    """``None`` unless requested."""
    state: dict[str, Any]
    user_metadata: dict[str, str]


@dataclass(frozen=True)
class CheckpointInfo:
    """Entry in a list of checkpoints. Times are seconds since the epoch."""

    path: TinkerPath
    created_at: float
    expires_at: float | None
    size_bytes: int
    user_metadata: dict[str, str]
    problem: str | None
    """Damage detected from the file sizes; ``None`` if there is none."""
    public: bool = False
    """Whether every owner of a server may read it."""
    state: dict[str, Any] = field(default_factory=dict)
    """JSON values as passed to ``write_checkpoint``."""


class CheckpointStore:
    """Runs and their checkpoints under one root.

    Opening it removes leftovers of crashed writers and expired checkpoints, except in runs that
    another process is writing to.

    Args:
        root: folder of the store; ``None`` is ``TINKER_COOKBOOK_HOME`` or ``~/.tinker_cookbook``.
        clock: returns the time in seconds since the epoch.
        owner: owner of the runs. Errors then name the owner and not the folder, which remote
            clients must not see.
    """

    def __init__(
        self,
        root: Path | None = None,
        clock: Callable[[], float] = time.time,
        owner: str | None = None,
    ) -> None:
        self.root = home_dir() if root is None else Path(root).expanduser()
        self.clock = clock
        self.owner = owner
        for run in (self.root / "runs").glob("*/"):
            # Only these folders get temporary names. A run without leftovers is not locked.
            parents = [run, run / "archives", *(run / kind for kind in KINDS)]
            if not any(files.leftovers(parent) for parent in parents):
                continue
            # If the lock is held, another process is writing these files right now.
            with (
                suppress(CheckpointError, OSError),
                files.folder_lock(run, exclusive=True, timeout=0),
            ):
                for parent in parents:
                    files.recover(parent)
        self.expire()

    def create_run(self, run_id: str, info: RunInfo) -> RunRecord:
        """Registers a run; raises ``CheckpointError`` if the id exists."""
        folder = self._run_folder(run_id)
        fmt.check_metadata(info.user_metadata)
        with files.explain_disk_errors(f"creating run {run_id!r}", self.root):
            folder.mkdir(parents=True, exist_ok=True)
            # Without the lock, a process that opens the store would delete the temporary file.
            with files.folder_lock(folder, exclusive=True):
                if (folder / _RUN).exists():
                    raise CheckpointError(
                        f"run id: got {run_id!r}, which exists; expected a new one"
                    )
                now = self.clock()
                body = {"run_id": run_id, "created_at": now, **asdict(info)}
                files.replace_file(folder / _RUN, fmt.encode_json(body, "run info", indent=2))
                # The file's modification time is the time of last use: a crash cannot leave it
                # incomplete.
                os.utime(folder / _RUN, (now, now))
        return RunRecord(run_id, info, created_at=now, last_used_at=now)

    def get_run(self, run_id: str) -> RunRecord:
        """Returns the run with this id; raises ``CheckpointError`` with the nearest known ids."""
        path = self._run_folder(run_id) / _RUN
        try:
            body = json.loads(path.read_bytes())
            created_at = body.pop("created_at")
            # The folder was copied or renamed by hand.
            if body.pop("run_id") != run_id:
                raise ValueError("it describes another run")
            info = RunInfo(**body)
        except FileNotFoundError:
            raise self._unknown_run(run_id) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                self._shown(
                    f"{path}: got {path.stat().st_size} bytes that do not describe a run ({error})"
                )
            ) from error
        return RunRecord(run_id, info, created_at, last_used_at=path.stat().st_mtime)

    def list_runs(self) -> list[RunRecord]:
        """Returns all runs, newest first, without those whose ``run.json`` is damaged."""
        records = []
        for run_id in self.run_ids():
            try:
                records.append(self.get_run(run_id))
            except CheckpointError as error:
                logger.warning("Skipped in the list of runs: %s", error)
        return sorted(records, key=lambda record: (-record.created_at, record.run_id))

    def run_ids(self) -> list[str]:
        """Returns the sorted ids of all runs; other folders are ignored."""
        # A folder without ``run.json`` is not a run, or its ``create_run`` has not finished.
        folders = (path.parent.name for path in (self.root / "runs").glob(f"*/{_RUN}"))
        return sorted(filter(fmt.is_safe_name, folders))

    def write_checkpoint(
        self,
        run_id: str,
        kind: Kind,
        name: str,
        *,
        adapter: Mapping[str, Tensor],
        adapter_config: Mapping[str, Any],
        adapter_metadata: Mapping[str, str] | None = None,
        optimizer: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Any] | None = None,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Saves a checkpoint durably and returns ``tinker://RUN/KIND/NAME``.

        Args:
            run_id: a run registered by ``create_run``.
            kind: ``weights`` or ``sampler_weights``; the latter has no ``optimizer``.
            name: name of the checkpoint within its run and kind.
            adapter: tensors under PEFT's names.
            adapter_config: content of PEFT's ``adapter_config.json``.
            adapter_metadata: texts for the header of the adapter's file, which is copied and
                downloaded with it.
            optimizer: optimizer tensors, or ``None``.
            state: JSON values to restore (step, RNG, versions).
            ttl_seconds: seconds until it expires; ``None``: never.
            overwrite: whether to replace an existing checkpoint of this name, atomically.
            user_metadata: stored and listed, not interpreted.

        Raises:
            CheckpointError: the name is taken or unsafe, the run unknown, the disk full.
        """
        path = TinkerPath(run_id, kind, name)
        if kind == "sampler_weights" and optimizer is not None:
            raise CheckpointError(f"{path}: got an optimizer state, expected kind 'weights' for it")
        contents = {
            fmt.ADAPTER_CONFIG: partial(fmt.encode_json, adapter_config, "adapter_config", 2),
            fmt.ADAPTER: partial(fmt.encode_tensors, adapter, adapter_metadata),
        }
        if optimizer is not None:
            contents[fmt.OPTIMIZER] = partial(fmt.encode_tensors, optimizer)
        now = self.clock()
        content = chain(
            fmt.expiry_file(now, ttl_seconds).items(),
            fmt.encode_checkpoint(contents, state or {}, user_metadata or {}, now),
        )
        folder = self._folder(path)
        with self._writing(path, "saving"):
            os.utime(self._run_folder(run_id) / _RUN, (now, now))  # saving is a use of the run
            # Check under the lock: two writers of the same name must not both find it free.
            if folder.exists() and not overwrite and not self._is_expired(folder):
                raise CheckpointError(
                    f"{path}: there is a checkpoint of this name. Choose another name, pass "
                    "overwrite=True, or delete it."
                )
            # ``content`` is generated here, one file at a time, and written directly to disk.
            files.replace_folder(folder, content)
            # An existing archive has the replaced checkpoint.
            self._archive_file(path).unlink(missing_ok=True)
        return str(path)

    def read_checkpoint(self, tinker_path: str, *, with_optimizer: bool) -> LoadedCheckpoint:
        """Loads a checkpoint and verifies all checksums. Raises ``CheckpointError`` if it is
        missing, expired or damaged (with file, size and expected size), or lacks its optimizer."""
        path = TinkerPath.parse(tinker_path)
        # Check before reading the disk: the path alone shows the mistake.
        if with_optimizer and path.kind == "sampler_weights":
            raise CheckpointError(
                f"{path}: sampler_weights have only the adapter, no optimizer state. Load it "
                "without optimizer, or give a path of save_state. "
                + some_of("The run has weights", self._names(path.run_id, "weights"))
            )
        with self._reading(path) as folder:
            state = fmt.read_state(folder)
            if with_optimizer and fmt.OPTIMIZER not in state.files:
                raise CheckpointError(
                    f"{path}: was saved without optimizer state. Load it without optimizer"
                )
            optimizer = fmt.read_tensors(folder, fmt.OPTIMIZER, state) if with_optimizer else None
            return LoadedCheckpoint(
                path=path,
                adapter=fmt.read_tensors(folder, fmt.ADAPTER, state),
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
        with files.folder_lock(self._run_folder(run_id), exclusive=False):
            found = [
                self._describe(path)
                for path in self._paths(run_id)
                if not self._is_expired(self._folder(path))
            ]
        return sorted(found, key=lambda info: (info.created_at, str(info.path)))

    def delete_checkpoint(self, tinker_path: str) -> None:
        """Deletes a checkpoint permanently, damaged or not."""
        path = TinkerPath.parse(tinker_path)
        with self._writing(path, "deleting"):
            if not self._folder(path).exists():
                raise self._missing(path)
            self._delete(path)

    def set_ttl(self, tinker_path: str, ttl_seconds: int | None) -> None:
        """Sets the expiry to ``ttl_seconds`` from now; ``None``: never."""
        path = TinkerPath.parse(tinker_path)
        expiry = fmt.expiry_file(self.clock(), ttl_seconds)
        self._mark(path, "setting the TTL of", fmt.EXPIRES_AT, expiry.get(fmt.EXPIRES_AT))

    def set_public(self, tinker_path: str, public: bool) -> None:
        """Publishes a checkpoint for all owners of a server, or unpublishes it; a checkpoint that
        replaces it is not public."""
        path = TinkerPath.parse(tinker_path)
        doing = "publishing" if public else "unpublishing"
        self._mark(path, doing, fmt.PUBLIC, b"" if public else None)

    def _mark(self, path: TinkerPath, doing: str, name: str, content: bytes | None) -> None:
        """Writes the file ``name`` of a checkpoint, or removes it; both durably."""
        folder = self._folder(path)
        with self._writing(path, doing):
            if not folder.exists() or self._is_expired(folder):
                raise self._missing(path)
            if content is None:
                (folder / name).unlink(missing_ok=True)
                files.sync_folder(folder)
            else:
                files.replace_file(folder / name, content)

    def expire(self) -> list[str]:
        """Deletes expired checkpoints, except in runs that another process is writing to; returns
        their paths."""
        expired = []
        for path in chain.from_iterable(map(self._paths, self.run_ids())):
            if not self._is_expired(self._folder(path)):
                continue
            # ``timeout=0``: opening a store must not wait for a run that is in use.
            with suppress(CheckpointError), self._writing(path, "deleting", timeout=0):
                if self._is_expired(self._folder(path)):  # the TTL may have changed
                    self._delete(path)
                    expired.append(str(path))
                    logger.info("Deleted %s, which expired", path)
        return expired

    def peft_files(self, tinker_path: str) -> dict[str, bytes]:
        """Returns, by name, the files that ``PeftModel.from_pretrained`` needs."""
        with self._reading(TinkerPath.parse(tinker_path)) as folder:
            state, names = fmt.read_state(folder), (fmt.ADAPTER_CONFIG, fmt.ADAPTER)
            return {name: fmt.read_sealed(folder, name, state) for name in names}

    def copy_out(self, tinker_path: str, folder: Path) -> Path:
        """Copies ``peft_files`` into ``folder``, which must be new or empty."""
        path, folder = TinkerPath.parse(tinker_path), Path(folder).expanduser().absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder}: expected a new or empty folder to copy {path} into")
        # Verify all checksums before changing the target.
        content = self.peft_files(tinker_path)
        with files.explain_disk_errors(f"copying {path} to {folder}", folder.parent):
            files.replace_folder(folder, content.items())
        return folder

    def archive(self, tinker_path: str) -> Path:
        """Writes a tar file with ``peft_files`` into the store and returns its path. It is deleted
        with the checkpoint."""
        # Not compressed, because weights are incompressible; equal content gives equal bytes.
        path = TinkerPath.parse(tinker_path)
        target, packed = self._archive_file(path), io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, data in self.peft_files(tinker_path).items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), 0o644
                archive.addfile(entry, io.BytesIO(data))
        # The tar was built without the exclusive lock, so the checkpoint may have been deleted.
        with self._writing(path, "archiving"):
            if not self._folder(path).exists():
                raise self._missing(path)
            target.parent.mkdir(exist_ok=True)
            files.replace_file(target, packed.getvalue())
        return target

    def _describe(self, path: TinkerPath) -> CheckpointInfo:
        folder = self._folder(path)
        problem, state = None, fmt.StateFile({}, {}, folder.stat().st_mtime, {})
        try:
            state = fmt.read_state(folder)
            # Check only sizes: checksums would require reading all files.
            for name in state.files:
                state.check_size(folder / name)
        except CheckpointError as error:
            problem = self._shown(str(error))
        return CheckpointInfo(
            path=path,
            created_at=state.created_at,
            expires_at=fmt.read_expiry(folder),
            size_bytes=sum(file["size_bytes"] for file in state.files.values()),
            user_metadata=state.user_metadata,
            problem=problem,
            public=(folder / fmt.PUBLIC).exists(),
            state=state.state,
        )

    def _delete(self, path: TinkerPath) -> None:
        files.delete_folder(self._folder(path))
        self._archive_file(path).unlink(missing_ok=True)

    @contextmanager
    def _writing(
        self, path: TinkerPath, doing: str, timeout: float = files.LOCK_TIMEOUT
    ) -> Iterator[None]:
        """Holds the run's exclusive lock, after recovery from crashed writers."""
        with files.explain_disk_errors(f"{doing} {path}", self.root):
            self.get_run(path.run_id)
            run = self._run_folder(path.run_id)
            with files.folder_lock(run, exclusive=True, timeout=timeout):
                # Under the lock, every temporary folder belongs to a crashed writer.
                files.recover(self._folder(path).parent)
                yield

    @contextmanager
    def _reading(self, path: TinkerPath) -> Iterator[Path]:
        """Yields the checkpoint's folder under the shared lock; errors state a remedy."""
        folder, run = self._folder(path), self._run_folder(path.run_id)
        if not run.exists():
            raise self._missing(path)
        # Only the lock distinguishes a crashed writer (recover its files) from a running one.
        if not folder.exists() and files.leftovers(folder.parent):
            with self._writing(path, "recovering"):
                pass
        with files.folder_lock(run, exclusive=False):
            if not folder.exists():
                raise self._missing(path)
            try:
                if self._is_expired(folder):
                    seconds = fmt.read_expiry(folder) or 0.0
                    expired_at = datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
                    raise CheckpointNotFoundError(f"{path}: expired at {expired_at}")
                yield folder
            except CheckpointError as error:
                text = f"{self._shown(str(error))}. {self._others(path)}"
                raise type(error)(text) from error

    def _missing(self, path: TinkerPath) -> CheckpointError:
        if path.run_id not in self.run_ids():
            return self._unknown_run(path.run_id)
        hint = nearest(path.name, self._names(path.run_id, path.kind))
        if same := [str(one) for one in self._paths(path.run_id) if one.name == path.name]:
            hint = f"; there is {same[0]}"
        return CheckpointNotFoundError(
            f"{path}: there is no such checkpoint{hint}. {self._others(path)}"
        )

    def _unknown_run(self, run_id: str) -> CheckpointError:
        known = self.run_ids()
        whose = f"under {self.root}" if self.owner is None else f"of {self.owner!r}"
        listed = some_of("Its runs", known)
        if self.owner is None and self.root == home_dir():
            # Ids say less than the names of folders.
            listed = "`python -m tinker_cookbook.runs list` shows them with their log_path."
        return CheckpointNotFoundError(
            f"run id: got {run_id!r}, which is not among the {len(known)} runs {whose}"
            f"{nearest_sentence(run_id, known)} {listed}"
        )

    def _others(self, path: TinkerPath) -> str:
        names = [name for name in self._names(path.run_id, path.kind) if name != path.name]
        return some_of(f"Other {path.kind} of this run to load instead", names)

    def _shown(self, text: str) -> str:
        """Hides the store's folder in an error if the owner is a client of a server."""
        return text if self.owner is None else text.replace(f"{self.root}{os.sep}", "")

    def _paths(self, run_id: str) -> list[TinkerPath]:
        return [TinkerPath(run_id, kind, n) for kind in KINDS for n in self._names(run_id, kind)]

    def _names(self, run_id: str, kind: Kind) -> list[str]:
        found = (self._run_folder(run_id) / kind).glob("*")
        return sorted(one.name for one in found if fmt.is_safe_name(one.name) and one.is_dir())

    def _run_folder(self, run_id: str) -> Path:
        check_name(run_id, "run id")
        return self.root / "runs" / run_id

    def _folder(self, path: TinkerPath) -> Path:
        return self._run_folder(path.run_id) / path.kind / path.name

    def _archive_file(self, path: TinkerPath) -> Path:
        return self._run_folder(path.run_id) / "archives" / f"{path.kind}.{path.name}.tar"

    def _is_expired(self, folder: Path) -> bool:
        expires_at = fmt.read_expiry(folder)
        return expires_at is not None and expires_at <= self.clock()
