"""Checkpoints of a run: saving in the right order, and the list on disk.

A checkpoint is complete when its line is in ``log_path/checkpoints.jsonl``: the weights are saved
first, then the line is appended. A run killed in between leaves saved weights without a line,
which the resumed run overwrites.

``"batch": k`` means that exactly k optimizer updates are in the checkpoint. Operations of a
training client run in the order in which they were *submitted*, so a save must be submitted right
after the last update that it includes and before the next batch: :meth:`RunCheckpoints.due` returns
whether one is due after an update that has been submitted, and :meth:`RunCheckpoints.save_async`
submits it, waits for it and appends the line.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tinker_cookbook.backends.protocols import Future, RestClient, TrainingClient
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.run.jsonl import append_row, read_rows, trim_rows
from tinker_cookbook.run.paths import CHECKPOINTS_FILE, local_path
from tinker_cookbook.utils.command_line.entrypoint import server_error_message

logger = logging.getLogger(__name__)

FINAL_NAME = "final"
BEST_NAME = "best"

SaveReason = Literal["periodic", "rolling", "final", "best"]


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
        """Reads a line; keys that are not fields go into ``extra``."""
        if "name" not in d:
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
        paths: dict[str, str] = {}
        # Both saves have been submitted, so the order of waiting does not matter.
        for key, future in self.futures.items():
            with self.explaining(key):
                paths[key] = (await future).path
        return self.listed(paths)

    def commit(self) -> CheckpointRecord:
        """As :meth:`commit_async`, for code without an event loop."""
        paths: dict[str, str] = {}
        for key, future in self.futures.items():
            with self.explaining(key):
                paths[key] = future.result().path
        return self.listed(paths)

    @contextmanager
    def explaining(self, key: str) -> Iterator[None]:
        """Context for waiting for ``futures[key]``, in which an error is a CheckpointError."""
        try:
            yield
        except Exception as error:
            reason = server_error_message(error) or str(error)
            raise CheckpointError(
                f"checkpoint {self.name}: its {key.removesuffix('_path')} could not be saved: "
                f"{reason.rstrip('.')}. The checkpoints listed in "
                f"{self.log_path / CHECKPOINTS_FILE} are intact"
            ) from error

    def listed(self, paths: Mapping[str, str]) -> CheckpointRecord:
        """Appends the line with the paths of the saved weights."""
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
    place = (log_path, loop_state, kind, ttl_seconds, store)
    return paths_of(submit_checkpoint(training_client, name, *place).commit())


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
    place = (log_path, loop_state, kind, ttl_seconds, store)
    return paths_of(await submit_checkpoint(training_client, name, *place).commit_async())


def paths_of(record: CheckpointRecord) -> dict[str, str]:
    """Returns ``state_path`` and ``sampler_path`` of a checkpoint, those that it has."""
    paths = {"state_path": record.state_path, "sampler_path": record.sampler_path}
    return {key: path for key, path in paths.items() if path is not None}


@dataclass(frozen=True)
class SavePolicy:
    """When checkpoints are saved and how long they are kept. 0 switches a rule off.

    Attributes:
        save_every: Updates between periodic checkpoints.
        save_every_tokens: Save when the tokens trained on cross a multiple of this.
        save_every_seconds: Save at the first update this long after the last save.
        rolling_save_every: Updates between rolling checkpoints, of which one is kept.
        ttl_seconds: Lifetime of periodic checkpoints; ``None`` keeps them.
        rolling_ttl_seconds: Lifetime of rolling ones that are not deleted earlier.
        final_ttl_seconds: Lifetime of the final one.
    """

    save_every: int = 20
    save_every_tokens: int = 0
    save_every_seconds: float = 0
    rolling_save_every: int = 0
    ttl_seconds: int | None = None
    rolling_ttl_seconds: int | None = 7200
    final_ttl_seconds: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and value < 0:
                raise ConfigurationError(f"{f.name}={value}; expected 0 (off) or more")


class RunCheckpoints:
    """Decides when a run is saved, saves it, and keeps one rolling checkpoint.

    Args:
        training_client: Has the weights to save.
        log_path: The run's folder.
        policy: When to save.
        total_steps: Updates of the whole run: after the last one the final checkpoint is due.
        tokens_done: Tokens trained on before this process started, so that a resumed run saves at
            the same token counts as one that was never stopped.
        rest_client: Deletes a rolling checkpoint once a newer one is listed; without it they
            expire by their TTL.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        training_client: TrainingClient,
        log_path: str | os.PathLike[str],
        policy: SavePolicy,
        total_steps: int,
        tokens_done: int = 0,
        rest_client: RestClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.total_steps = total_steps
        self._client = training_client
        self._log_path = local_path(log_path)
        self._rest_client = rest_client
        self._clock = clock
        self._tokens = tokens_done
        self._last_save = clock()
        self._reasons: dict[int, SaveReason | None] = {}

    def due(self, step: int, tokens: int = 0) -> SaveReason | None:
        """Returns whether, and why, a checkpoint is due after update ``step`` (counted from 1).

        The first result for a step is kept. A loop calls this when it submits the step, and again
        when the step is done. By then later steps are submitted, and a save that has become due by
        the clock would include their updates.

        Args:
            step: Updates done, or submitted, this one included.
            tokens: Tokens trained on up to and with this update.
        """
        if step in self._reasons:
            return self._reasons[step]
        policy, reason = self.policy, None
        every_tokens, every_seconds = policy.save_every_tokens, policy.save_every_seconds
        waited = self._clock() - self._last_save
        # The last step writes the final checkpoint instead of any periodic one.
        if step >= self.total_steps:
            reason = "final"
        elif (
            (policy.save_every > 0 and step % policy.save_every == 0)
            or (every_tokens > 0 and tokens // every_tokens > self._tokens // every_tokens)
            or (every_seconds > 0 and waited >= every_seconds)
        ):
            reason = "periodic"
        elif policy.rolling_save_every > 0 and step % policy.rolling_save_every == 0:
            reason = "rolling"
        # Stored even if nothing is due: a later call for this step must not decide otherwise.
        self._reasons[step] = reason
        return reason

    async def save_async(
        self, step: int, epoch: int, reason: SaveReason, loop_state: Mapping[str, Any] | None = None
    ) -> CheckpointRecord:
        """Saves what closes update ``step``, appends its line, then deletes what it replaces.

        These are the rolling checkpoints before it, and the best ones before the newest best one.
        ``loop_state`` adds keys to the line; ``save_every_tokens`` counts its
        ``cumulative_tokens``.

        Errors as :meth:`PendingCheckpoint.commit_async`; a deletion that fails is only logged.
        """
        state = {"batch": step, "epoch": epoch, **(loop_state or {})}
        policy, ttl = self.policy, self.policy.ttl_seconds
        kind: CheckpointKind = "both" if reason in ("final", "best") else "state"
        name = f"{step:06d}"
        if reason == "rolling":
            state["rolling"], ttl = True, policy.rolling_ttl_seconds
        elif reason == "final":
            name, state["final"], ttl = FINAL_NAME, True, policy.final_ttl_seconds
        elif reason == "best":
            # The line says "best"; the weights of the best so far must exist until it is written.
            name, ttl = f"{BEST_NAME}-{name}", None
            state |= {"name": BEST_NAME, "best": True}
        # The next multiple of save_every_tokens is counted from this save.
        self._tokens = state.get("cumulative_tokens", self._tokens)
        self._last_save = self._clock()
        # A loop does not call ``due`` for earlier steps again.
        self._reasons = {at: why for at, why in self._reasons.items() if at >= step}
        pending = submit_checkpoint(self._client, name, self._log_path, state, kind, ttl)
        # First the new line, then deletions: at any time a checkpoint to resume from is listed.
        record = await pending.commit_async()
        if self._rest_client is not None:
            await self._delete_replaced(self._rest_client, record.batch or 0)
        return record

    async def _delete_replaced(self, rest_client: RestClient, step: int) -> None:
        listed = load_checkpoints_file(self._log_path)
        best = max((old.batch or 0 for old in listed if old.extra.get("best")), default=0)
        for old in listed:
            # A killed process may have left an older best one, too.
            before = best if old.extra.get("best") else step
            replaceable = old.extra.get("rolling") or old.extra.get("best")
            if not replaceable or (old.batch or 0) >= before:
                continue
            for path in paths_of(old).values():
                try:
                    await rest_client.delete_checkpoint_from_tinker_path(path)
                except Exception as error:  # a leftover costs disk space, not the run
                    logger.warning("checkpoint %s was not deleted: %s", path, error)
            # Its line is removed in either case: it is superseded, and one attempt is enough.
            lines = self._log_path / CHECKPOINTS_FILE
            state_path = old.state_path
            trim_rows(lines, lambda row, path=state_path: row.get("state_path") != path)
