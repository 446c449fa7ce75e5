"""Saving one checkpoint: submit, wait, and only then list it."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.utils.checkpoints.futures import run_async, run_blocking
from tinker_cookbook.utils.checkpoints.records import CHECKPOINTS_FILE, CheckpointRecord
from tinker_cookbook.utils.run_folder.jsonl import append_row
from tinker_cookbook.utils.run_folder.paths import local_path

if TYPE_CHECKING:
    from tinker_cookbook.backends.protocols import Future, TrainingClient

CheckpointKind = Literal["state", "sampler", "both"]
"""``state`` holds adapter and optimizer (to resume), ``sampler`` the adapter alone."""


@dataclass
class PendingCheckpoint:
    """A save that has been submitted and whose line is not written yet."""

    name: str
    log_path: Path
    loop_state: dict[str, Any]
    futures: dict[str, Future[Any]]
    store: Any = None

    async def commit_async(self) -> CheckpointRecord:
        """Waits for the save, then appends the line.

        Raises:
            CheckpointError: The save failed; earlier checkpoints are intact.
            TrainingError: The line cannot be written.
        """
        return await run_async(self.commit_steps())

    def commit(self) -> CheckpointRecord:
        """As :meth:`commit_async`, for code without an event loop."""
        return run_blocking(self.commit_steps())

    def commit_steps(self) -> Generator[Future[Any], Any, CheckpointRecord]:
        """What both do: yields each future to wait for and is sent its result."""
        paths: dict[str, str] = {}
        for key, future in self.futures.items():
            try:
                paths[key] = (yield future).path
            except Exception as error:
                raise CheckpointError(
                    f"checkpoint {self.name}: its {key.removesuffix('_path')} could not be saved: "
                    f"{str(error).rstrip('.')}. The checkpoints listed in "
                    f"{self.log_path / CHECKPOINTS_FILE} are intact"
                ) from error
        record = CheckpointRecord.from_dict({"name": self.name, **self.loop_state, **paths})
        if self.store is not None:
            self.store.write_checkpoint(record.to_dict())
        else:
            append_row(self.log_path / CHECKPOINTS_FILE, record.to_dict(), durable=True)
        return record


def submit_checkpoint(
    training_client: TrainingClient,
    name: str,
    log_path: str | os.PathLike[str],
    loop_state: Mapping[str, Any],
    kind: CheckpointKind = "state",
    ttl_seconds: int | None = None,
    store: Any = None,
    overwrite: bool = True,
) -> PendingCheckpoint:
    """Submits a save of the weights as they are after the operations submitted so far.

    Args:
        training_client: Whose weights.
        name: Last part of the path; weights of that name, left by a crash, are overwritten.
        log_path: The run's folder.
        loop_state: What the line records beside the paths: ``batch``, ``epoch`` and any others.
        kind: What to save.
        ttl_seconds: Time after which the backend may delete it; ``None`` keeps it.
        store: Takes the line through ``store.write_checkpoint(line)`` in place of the file.
        overwrite: Whether weights of that name are overwritten; else the backend refuses them.
    """
    if kind not in ("state", "sampler", "both"):
        raise ConfigurationError(f"kind={kind!r}; expected state, sampler or both")
    futures: dict[str, Future[Any]] = {}
    if kind != "sampler":
        # Left out where it is the default: clients of other makers may not know it.
        options = {"overwrite": True} if overwrite else {}
        futures["state_path"] = training_client.save_state(name, ttl_seconds=ttl_seconds, **options)
    if kind != "state":
        futures["sampler_path"] = training_client.save_weights_for_sampler(
            name, ttl_seconds=ttl_seconds
        )
    return PendingCheckpoint(name, local_path(log_path), dict(loop_state), futures, store)


def save_checkpoint(
    training_client: TrainingClient,
    name: str,
    log_path: str | os.PathLike[str],
    loop_state: Mapping[str, Any],
    kind: CheckpointKind = "state",
    ttl_seconds: int | None = None,
    store: Any = None,
) -> dict[str, str]:
    """Saves a checkpoint and lists it; returns its ``state_path`` and/or ``sampler_path``.

    Arguments and errors as in :func:`submit_checkpoint` and :class:`PendingCheckpoint`.
    """
    pending = submit_checkpoint(
        training_client, name, log_path, loop_state, kind, ttl_seconds, store
    )
    return paths_of(pending.commit())


async def save_checkpoint_async(
    training_client: TrainingClient,
    name: str,
    log_path: str | os.PathLike[str],
    loop_state: Mapping[str, Any],
    kind: CheckpointKind = "state",
    ttl_seconds: int | None = None,
    store: Any = None,
) -> dict[str, str]:
    """As :func:`save_checkpoint`, awaitable. The save is submitted when the coroutine starts."""
    pending = submit_checkpoint(
        training_client, name, log_path, loop_state, kind, ttl_seconds, store
    )
    return paths_of(await pending.commit_async())


def paths_of(record: CheckpointRecord) -> dict[str, str]:
    """Returns ``state_path`` and ``sampler_path`` of a checkpoint, those that it has."""
    paths = {"state_path": record.state_path, "sampler_path": record.sampler_path}
    return {key: path for key, path in paths.items() if path is not None}
