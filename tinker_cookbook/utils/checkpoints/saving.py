"""Saves a checkpoint and lists it in ``checkpoints.jsonl``: submit, wait, then append the line.

Code that is offered blocking and awaitable has one body: a generator that yields each backend
future it waits for and is sent the result, or thrown the error. :func:`run_blocking` and
:func:`run_async` drive it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.utils.command_line.entrypoint import server_error_message
from tinker_cookbook.utils.run_folder.jsonl import append_row, read_rows
from tinker_cookbook.utils.run_folder.paths import local_path

if TYPE_CHECKING:
    from tinker_cookbook.backends.protocols import Future, TrainingClient

logger = logging.getLogger(__name__)

CHECKPOINTS_FILE = "checkpoints.jsonl"
T = TypeVar("T")


def run_blocking(steps: Generator[Future[Any], Any, T]) -> T:
    """Runs ``steps`` and waits for each future with ``.result()``."""
    try:
        future = next(steps)
        while True:
            try:
                # The error is raised at the ``yield``, so that the steps can handle it.
                value = future.result()
            except Exception as error:
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as stop:
        return stop.value


async def run_async(steps: Generator[Future[Any], Any, T]) -> T:
    """Runs ``steps`` and awaits each future."""
    try:
        future = next(steps)
        while True:
            try:
                value = await future
            except Exception as error:
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as stop:
        return stop.value


@dataclass
class CheckpointRecord:
    """One line of ``checkpoints.jsonl``.

    Attributes:
        name: ``"000020"`` or ``"final"``.
        batch: Optimizer updates in it.
        epoch: Epoch that the next batch belongs to.
        final: Whether the run was complete; ``None`` if the line does not state it.
        state_path: ``tinker://RUN/weights/NAME``, or ``None`` if only the sampler was saved.
        sampler_path: ``tinker://RUN/sampler_weights/NAME``, or ``None``.
        extra: All other keys of the line (token counts, ``rolling``, what a recipe adds).
    """

    name: str
    batch: int | None = None
    epoch: int | None = None
    final: bool | None = None
    state_path: str | None = None
    sampler_path: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An extra key with the name of a field would be written twice.
        twice = sorted(_FIELDS & set(self.extra))
        if twice:
            logger.warning("checkpoint %s: extra keys %s are left out", self.name, twice)
            self.extra = {key: value for key, value in self.extra.items() if key not in twice}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> CheckpointRecord:
        """Reads a line; keys that are not fields go into ``extra``.

        Raises:
            CheckpointError: There is no name.
        """
        if not isinstance(d.get("name"), str):
            raise CheckpointError(f"a line of {CHECKPOINTS_FILE} has no name: {dict(d)}")
        named = {key: value for key, value in d.items() if key in _FIELDS}
        return cls(**named, extra={key: d[key] for key in d if key not in _FIELDS})

    def to_dict(self) -> dict[str, Any]:
        """Returns the line's content; fields that are not set are left out."""
        row = {key: getattr(self, key) for key in _FIELD_ORDER if getattr(self, key) is not None}
        return row | self.extra

    def has(self, key: str) -> bool:
        """Returns whether a field is set, or an extra key exists."""
        return getattr(self, key) is not None if key in _FIELDS else key in self.extra

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field (``None`` if it is not set) or an extra key, otherwise ``default``."""
        return getattr(self, key) if key in _FIELDS else self.extra.get(key, default)

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value


_FIELD_ORDER = tuple(f.name for f in fields(CheckpointRecord) if f.name != "extra")
_FIELDS = frozenset(_FIELD_ORDER)


def load_checkpoints_file(log_dir: str | os.PathLike[str]) -> list[CheckpointRecord]:
    """Returns all checkpoints of a log folder, oldest first; none if there is no file.

    Raises:
        DataFormatError: A line other than a torn last one is broken.
    """
    rows = read_rows(local_path(log_dir, "log_dir") / CHECKPOINTS_FILE)
    return [CheckpointRecord.from_dict(row) for row in rows]


def get_last_checkpoint(
    log_dir: str | os.PathLike[str], required_key: str = "state_path"
) -> CheckpointRecord | None:
    """Returns the newest checkpoint that has ``required_key``, or ``None``.

    Args:
        log_dir: The run's folder.
        required_key: ``state_path`` to resume, ``sampler_path`` to sample.
    """
    for record in reversed(load_checkpoints_file(log_dir)):
        if record.get(required_key) is not None:
            return record
    return None


CheckpointKind = Literal["state", "sampler", "both"]
"""``state`` holds adapter and optimizer (to resume), ``sampler`` only the adapter."""


@dataclass
class PendingCheckpoint:
    """Submitted save whose line is not written yet."""

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
        """Yields each future to wait for, then appends the line."""
        paths: dict[str, str] = {}
        # Both saves have been submitted, so the order of waiting does not matter.
        for key, future in self.futures.items():
            try:
                paths[key] = (yield future).path
            except Exception as error:
                reason = server_error_message(error) or str(error)
                raise CheckpointError(
                    f"checkpoint {self.name}: its {key.removesuffix('_path')} could not be saved: "
                    f"{reason.rstrip('.')}. The checkpoints listed in "
                    f"{self.log_path / CHECKPOINTS_FILE} are intact"
                ) from error
        record = CheckpointRecord.from_dict({"name": self.name, **self.loop_state, **paths})
        if self.store is not None:
            self.store.write_checkpoint(record.to_dict())
        else:
            # Durable: the line must survive a power cut, since the run resumes from it.
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
        training_client: Has the weights to save.
        name: Last part of the path; weights of that name, left by a crash, are overwritten.
        log_path: The run's folder.
        loop_state: What the line records next to the paths: ``batch``, ``epoch`` and others.
        kind: What to save.
        ttl_seconds: Time after which the backend may delete it; ``None`` keeps it.
        store: Receives the line by ``store.write_checkpoint``; the file is not written then.
        overwrite: Whether weights of that name are overwritten; if not, the backend raises an
            error.
    """
    if kind not in ("state", "sampler", "both"):
        raise ConfigurationError(f"kind={kind!r}; expected state, sampler or both")
    futures: dict[str, Future[Any]] = {}
    # Both saves are submitted before either is awaited, so they have the same weights.
    if kind != "sampler":
        # Not passed if it is the default: clients of other makers may not have it.
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
