"""REST client of the bundled engine: lists and manages the runs and checkpoints on this disk.

It has the methods of ``tinker.RestClient``, and ``copy_out``. Each returns a future immediately and
runs in a separate thread, so that archiving gigabytes does not block the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import tinker
from tinker import types

from tinker_cookbook.backends.futures import AsyncNames, LocalFuture
from tinker_cookbook.engine.checkpoints.store import (
    CheckpointInfo,
    CheckpointStore,
    RunInfo,
    RunRecord,
    TinkerPath,
)
from tinker_cookbook.engine.model.resolve import merge_note
from tinker_cookbook.exceptions import BackendError, ConfigurationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

AccessScope = Literal["owned", "accessible"]

_TYPE_OF_KIND: dict[str, types.CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}

_FLAGS = ("train_mlp", "train_attn", "train_unembed", "train_vision")


class LocalWeightsInfo(types.WeightsInfoResponse):
    """The SDK's response, with the layers that only the bundled engine trains."""

    train_vision: bool = False


@dataclass(frozen=True)
class ArchiveUrl:
    """URL of a checkpoint's archive, readable with ``urllib``."""

    url: str
    expires: datetime | None
    """Expiry time of the checkpoint and its archive."""


class LocalRestClient(AsyncNames):
    """Lists and manages runs and checkpoints; see ``tinker.RestClient``.

    All runs on this disk belong to the user, so both access scopes list all of them.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        # One thread, so that operations on the store run in the order of the calls.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rest")

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> LocalFuture[types.TrainingRun]:
        """Returns a run by its id."""
        return self._submit(lambda: self._training_run(self._store.get_run(training_run_id)))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> LocalFuture[types.TrainingRun]:
        """Returns the run that wrote a checkpoint, even if the checkpoint was deleted."""
        return self.get_training_run(TinkerPath.parse(tinker_path).run_id)

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> LocalFuture[types.WeightsInfoResponse]:
        """Returns base model and adapter shape of a checkpoint."""

        def work() -> types.WeightsInfoResponse:
            info = self._run_info(tinker_path)
            flags = {name: getattr(info, name) for name in _FLAGS}
            return LocalWeightsInfo(
                base_model=info.base_model, is_lora=True, lora_rank=info.lora_rank, **flags
            )

        return self._submit(work)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> LocalFuture[types.TrainingRunsResponse]:
        """Lists runs, newest first."""
        _check_page(limit, offset)
        if project_id is not None:
            raise BackendError(
                f"project_id: got {project_id!r}, but the local engine has no projects; leave it "
                "out to list all runs"
            )

        def work() -> types.TrainingRunsResponse:
            runs = self._store.list_runs()
            page = [self._training_run(run) for run in runs[offset : offset + limit]]
            return types.TrainingRunsResponse(
                training_runs=page, cursor=_cursor(limit, offset, runs)
            )

        return self._submit(work)

    def list_checkpoints(self, training_run_id: str) -> LocalFuture[types.CheckpointsListResponse]:
        """Lists the checkpoints of a run, oldest first."""

        def work() -> types.CheckpointsListResponse:
            infos = self._store.list_checkpoints(training_run_id)
            return types.CheckpointsListResponse(checkpoints=[_checkpoint(info) for info in infos])

        return self._submit(work)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> LocalFuture[types.CheckpointsListResponse]:
        """Lists the checkpoints of all runs, newest first."""
        _check_page(limit, offset)

        def work() -> types.CheckpointsListResponse:
            runs = self._store.list_runs()
            infos = [info for run in runs for info in self._store.list_checkpoints(run.run_id)]
            # Break ties by path, so that pages neither overlap nor miss an entry.
            infos.sort(key=lambda info: (-info.created_at, str(info.path)))
            return types.CheckpointsListResponse(
                checkpoints=[_checkpoint(info) for info in infos[offset : offset + limit]],
                cursor=_cursor(limit, offset, infos),
            )

        return self._submit(work)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> LocalFuture[None]:
        """Deletes the checkpoint ``weights/NAME`` or ``sampler_weights/NAME`` of a run
        permanently."""
        return self.delete_checkpoint_from_tinker_path(
            f"tinker://{training_run_id}/{checkpoint_id}"
        )

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> LocalFuture[None]:
        """Deletes a checkpoint permanently."""
        return self._submit(lambda: self._store.delete_checkpoint(tinker_path))

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> LocalFuture[None]:
        """Lets a checkpoint expire ``ttl_seconds`` from now; ``None`` keeps it permanently."""
        return self._submit(lambda: self._store.set_ttl(tinker_path, ttl_seconds))

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> LocalFuture[ArchiveUrl]:
        """Like ``get_checkpoint_archive_url_from_tinker_path``, by run and ``weights/NAME``."""
        path = f"tinker://{training_run_id}/{checkpoint_id}"
        return self.get_checkpoint_archive_url_from_tinker_path(path)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> LocalFuture[ArchiveUrl]:
        """Returns a ``file://`` URL of a tar file with the adapter in PEFT's format.

        The file is in the store and is deleted with the checkpoint; ``copy_out`` creates a folder.
        """

        def work() -> ArchiveUrl:
            archive = self._store.archive(tinker_path)
            return ArchiveUrl(
                url=archive.absolute().as_uri(),
                expires=_time(self._store.get_checkpoint(tinker_path).expires_at),
            )

        return self._submit(work)

    def copy_out(self, tinker_path: str, folder: str | Path) -> LocalFuture[Path]:
        """Copies the adapter into a new folder that ``PeftModel.from_pretrained`` loads.

        Logs a warning if merging it into its base model would be inexact.
        """

        def work() -> Path:
            # The adapter itself is exact; only merging would also change tied embeddings.
            copied = self._store.copy_out(tinker_path, Path(folder))
            info = self._run_info(tinker_path)
            if note := merge_note(info.base_model, info.train_unembed):
                logger.warning("%s: %s", copied, note)
            return copied

        return self._submit(work)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> LocalFuture[None]:
        """Makes a checkpoint readable for every owner of a server."""
        return self._submit(lambda: self._store.set_public(tinker_path, True))

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> LocalFuture[None]:
        """Makes a published checkpoint private again."""
        return self._submit(lambda: self._store.set_public(tinker_path, False))

    def __getattr__(self, name: str) -> Any:
        # A hint for methods of the hosted API.
        hosted = "; it is a feature of the hosted API (backend=tinker)"
        raise AttributeError(
            f"LocalRestClient has no {name!r}{hosted if hasattr(tinker.RestClient, name) else ''}"
        )

    def _run_info(self, tinker_path: str) -> RunInfo:
        """Returns the run of a checkpoint, with the checkpoint's adapter shape; reads no weights.

        The shapes differ if the run has loaded a checkpoint of another shape.
        """
        checkpoint = self._store.get_checkpoint(tinker_path)
        info, state = self._store.get_run(checkpoint.path.run_id).info, checkpoint.state
        flags = {name: state[name] for name in _FLAGS if name in state}
        return replace(info, lora_rank=state.get("rank", info.lora_rank), **flags)

    def _training_run(self, run: RunRecord) -> types.TrainingRun:
        # Checkpoints are sorted oldest first, so the newest of each kind remains.
        last: dict[str, types.Checkpoint] = {}
        for info in self._store.list_checkpoints(run.run_id):
            last[info.path.kind] = _checkpoint(info)
        return types.TrainingRun(
            training_run_id=run.run_id,
            base_model=run.info.base_model,
            model_owner="local",
            is_lora=True,
            lora_rank=run.info.lora_rank,
            last_request_time=datetime.fromtimestamp(run.last_used_at, UTC),
            last_checkpoint=last.get("weights"),
            last_sampler_checkpoint=last.get("sampler_weights"),
            user_metadata=run.info.user_metadata,
        )

    def _submit(self, work: Callable[[], T]) -> LocalFuture[T]:
        return LocalFuture(self._worker.submit(work))


def _checkpoint(info: CheckpointInfo) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"{info.path.kind}/{info.path.name}",
        checkpoint_type=_TYPE_OF_KIND[info.path.kind],
        time=datetime.fromtimestamp(info.created_at, UTC),
        tinker_path=str(info.path),
        size_bytes=info.size_bytes,
        user_metadata=info.user_metadata,
        expires_at=_time(info.expires_at),
        public=info.public,
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _cursor(limit: int, offset: int, found: Sequence[object]) -> types.Cursor:
    return types.Cursor(offset=offset, limit=limit, total_count=len(found))


def _check_page(limit: int, offset: int) -> None:
    if limit < 1 or offset < 0:
        raise ConfigurationError(
            f"limit, offset: got {limit}, {offset}; expected limit >= 1 and offset >= 0"
        )
