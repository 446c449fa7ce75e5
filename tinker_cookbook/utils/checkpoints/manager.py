"""When a run is saved, and which of its checkpoints are kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.checkpoints.futures import run_async, run_blocking
from tinker_cookbook.utils.checkpoints.records import (
    CHECKPOINTS_FILE,
    CheckpointRecord,
    load_checkpoints_file,
)
from tinker_cookbook.utils.checkpoints.saving import (
    CheckpointKind,
    PendingCheckpoint,
    submit_checkpoint,
)
from tinker_cookbook.utils.run_folder.jsonl import trim_rows
from tinker_cookbook.utils.run_folder.paths import local_path

if TYPE_CHECKING:
    from tinker_cookbook.backends.protocols import Future, RestClient, TrainingClient

logger = logging.getLogger(__name__)

FINAL_NAME = "final"

SaveReason = Literal["periodic", "rolling", "final"]


@dataclass(frozen=True)
class SavePolicy:
    """When checkpoints are saved and how long they are kept. 0 switches a rule off.

    Attributes:
        save_every: Updates between periodic checkpoints.
        save_every_tokens: Save when the tokens trained on cross a multiple of this.
        save_every_seconds: Save at the first update this long after the last save.
        rolling_save_every: Updates between rolling checkpoints, of which one is kept.
        ttl_seconds: Lifetime of periodic checkpoints; ``None`` keeps them.
        rolling_ttl_seconds: Lifetime of rolling ones, should they not be deleted before.
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
        training_client: Whose weights.
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
        self._answers: dict[int, SaveReason | None] = {}

    def due(self, step: int, tokens: int = 0) -> SaveReason | None:
        """Returns whether, and why, a checkpoint is due after update ``step`` (counted from 1).

        The first answer for a step stands: a loop that asked when it submitted the step, and then
        submitted more, must not be told otherwise by the clock when the step is done, because a
        save submitted then would hold the later updates too.

        Args:
            step: Updates done, or submitted, this one included.
            tokens: Tokens trained on up to and with this update.
        """
        if step not in self._answers:
            self._answers[step] = self._decide(step, tokens)
        return self._answers[step]

    def _decide(self, step: int, tokens: int) -> SaveReason | None:
        policy = self.policy
        if step >= self.total_steps:
            return "final"
        if _hits(step, policy.save_every) or self._crossed(tokens) or self._waited_long():
            return "periodic"
        return "rolling" if _hits(step, policy.rolling_save_every) else None

    def submit(
        self, step: int, epoch: int, reason: SaveReason, loop_state: Mapping[str, Any] | None = None
    ) -> PendingCheckpoint:
        """Submits the save that closes update ``step``; ``commit`` it afterwards.

        ``loop_state`` adds keys to the line; ``cumulative_tokens`` among them is the token count
        that ``save_every_tokens`` goes by.
        """
        state = {"batch": step, "epoch": epoch, **(loop_state or {})}
        policy = self.policy
        ttl = policy.ttl_seconds
        kind: CheckpointKind = "state"
        if reason == "rolling":
            state["rolling"], ttl = True, policy.rolling_ttl_seconds
        elif reason == "final":
            state["final"], ttl, kind = True, policy.final_ttl_seconds, "both"
        self._tokens = state.get("cumulative_tokens", self._tokens)
        self._last_save = self._clock()
        self._answers = {asked: why for asked, why in self._answers.items() if asked >= step}
        name = FINAL_NAME if reason == "final" else f"{step:06d}"
        return submit_checkpoint(self._client, name, self._log_path, state, kind, ttl)

    async def save_async(
        self, step: int, epoch: int, reason: SaveReason, loop_state: Mapping[str, Any] | None = None
    ) -> CheckpointRecord:
        """Submits and commits at once."""
        return await self.commit_async(self.submit(step, epoch, reason, loop_state))

    def save(
        self, step: int, epoch: int, reason: SaveReason, loop_state: Mapping[str, Any] | None = None
    ) -> CheckpointRecord:
        """As :meth:`save_async`, for code without an event loop."""
        return self.commit(self.submit(step, epoch, reason, loop_state))

    async def commit_async(self, pending: PendingCheckpoint) -> CheckpointRecord:
        """Waits for the save, appends its line, then deletes the rolling checkpoints before it.

        Errors as :meth:`PendingCheckpoint.commit_async`; a deletion that fails is only logged.
        """
        return await run_async(self._commit_steps(pending))

    def commit(self, pending: PendingCheckpoint) -> CheckpointRecord:
        """As :meth:`commit_async`, for code without an event loop."""
        return run_blocking(self._commit_steps(pending))

    def _commit_steps(
        self, pending: PendingCheckpoint
    ) -> Generator[Future[Any], Any, CheckpointRecord]:
        record = yield from pending.commit_steps()
        if self._rest_client is not None:
            yield from self._delete_rolling_before(record, self._rest_client)
        return record

    def _delete_rolling_before(
        self, record: CheckpointRecord, rest_client: RestClient
    ) -> Generator[Future[Any], Any, None]:
        for old in load_checkpoints_file(self._log_path):
            if not old.extra.get("rolling") or (old.batch or 0) >= (record.batch or 0):
                continue
            try:
                if old.state_path is not None:
                    yield rest_client.delete_checkpoint_from_tinker_path(old.state_path)
            except Exception as error:  # a leftover costs disk space, not the run
                logger.warning("rolling checkpoint %s was not deleted: %s", old.state_path, error)
            # Its line goes also then: it is superseded, and one attempt is enough.
            gone = old.state_path
            trim_rows(
                self._log_path / CHECKPOINTS_FILE,
                lambda row, gone=gone: row.get("state_path") != gone,
            )

    def _crossed(self, tokens: int) -> bool:
        every = self.policy.save_every_tokens
        return every > 0 and tokens // every > self._tokens // every

    def _waited_long(self) -> bool:
        every = self.policy.save_every_seconds
        return every > 0 and self._clock() - self._last_save >= every


def _hits(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
