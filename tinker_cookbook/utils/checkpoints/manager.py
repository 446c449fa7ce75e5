"""When a run is saved, and which of its checkpoints are kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.checkpoints.saving import (
    CHECKPOINTS_FILE,
    CheckpointKind,
    CheckpointRecord,
    PendingCheckpoint,
    load_checkpoints_file,
    paths_of,
    run_async,
    run_blocking,
    submit_checkpoint,
)
from tinker_cookbook.utils.run_folder.jsonl import trim_rows
from tinker_cookbook.utils.run_folder.paths import local_path

if TYPE_CHECKING:
    from tinker_cookbook.backends.protocols import (
        Future,
        RestClient,
        TrainingClient,
    )

logger = logging.getLogger(__name__)

FINAL_NAME = "final"
BEST_NAME = "best"

SaveReason = Literal["periodic", "rolling", "final", "best"]


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

    def submit(
        self, step: int, epoch: int, reason: SaveReason, loop_state: Mapping[str, Any] | None = None
    ) -> PendingCheckpoint:
        """Submits the save that closes update ``step``; ``commit`` it afterwards.

        ``loop_state`` adds keys to the line; ``save_every_tokens`` counts its
        ``cumulative_tokens``.
        """
        state = {"batch": step, "epoch": epoch, **(loop_state or {})}
        policy = self.policy
        ttl = policy.ttl_seconds
        kind: CheckpointKind = "state"
        if reason == "rolling":
            state["rolling"], ttl = True, policy.rolling_ttl_seconds
        elif reason == "final":
            state["final"], ttl, kind = True, policy.final_ttl_seconds, "both"
        elif reason == "best":
            state |= {"name": BEST_NAME, "best": True}
            ttl, kind = None, "both"
        # The next multiple of save_every_tokens is counted from this save.
        self._tokens = state.get("cumulative_tokens", self._tokens)
        self._last_save = self._clock()
        # A loop does not call ``due`` for earlier steps again.
        self._reasons = {at: why for at, why in self._reasons.items() if at >= step}
        name = FINAL_NAME if reason == "final" else f"{step:06d}"
        # Not under one name: the best so far must exist until the line of the new one is written.
        if reason == "best":
            name = f"{BEST_NAME}-{name}"
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
        """Waits for the save, appends its line, then deletes the checkpoints that it replaces.

        These are the rolling ones before it, and the best ones before the newest best one.

        Errors as :meth:`PendingCheckpoint.commit_async`; a deletion that fails is only logged.
        """
        return await run_async(self._commit_steps(pending))

    def commit(self, pending: PendingCheckpoint) -> CheckpointRecord:
        """As :meth:`commit_async`, for code without an event loop."""
        return run_blocking(self._commit_steps(pending))

    def _commit_steps(
        self, pending: PendingCheckpoint
    ) -> Generator[Future[Any], Any, CheckpointRecord]:
        # First the new line, then deletions: at any time a checkpoint to resume from is listed.
        record = yield from pending.commit_steps()
        if self._rest_client is None:
            return record
        listed = load_checkpoints_file(self._log_path)
        best = max((old.batch or 0 for old in listed if old.extra.get("best")), default=0)
        for old in listed:
            # A killed process may have left an older best one, too.
            before = best if old.extra.get("best") else record.batch or 0
            replaceable = old.extra.get("rolling") or old.extra.get("best")
            # The line of a later save may be written already.
            if not replaceable or (old.batch or 0) >= before:
                continue
            for path in paths_of(old).values():
                try:
                    yield self._rest_client.delete_checkpoint_from_tinker_path(path)
                except Exception as error:  # a leftover costs disk space, not the run
                    logger.warning("checkpoint %s was not deleted: %s", path, error)
            # Its line is removed in either case: it is superseded, and one attempt is enough.
            lines = self._log_path / CHECKPOINTS_FILE
            state_path = old.state_path
            trim_rows(lines, lambda row, path=state_path: row.get("state_path") != path)
        return record
