"""The checkpoint manager of ``checkpoint_utils`` for loops of user code."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Generator, Mapping
from typing import Any

from tinker_cookbook.backends.protocols import Future, ServiceClient, TrainingClient
from tinker_cookbook.official.steps import run_async, run_blocking
from tinker_cookbook.run.checkpoints import (
    CheckpointKind,
    SavePolicy,
    paths_of,
    submit_checkpoint,
)

logger = logging.getLogger(__name__)

Paths = dict[str, str]
_SAVE_FAILED = "a %s checkpoint could not be saved: %s"


class CheckpointManager:
    """Saves a loop's checkpoints: periodic ones, rolling ones to resume from, and a final one.

    A loop calls ``maybe_save`` after each step and ``save_final`` at its end (or their ``_async``
    forms). Rolling checkpoints are a convenience: one that fails is logged and the loop continues;
    each is deleted once a newer one is listed, the last one by ``save_final``.

    Args:
        training_client: Has the weights to save.
        service_client: Its rest client deletes superseded rolling checkpoints.
        log_path: The run's folder, where ``checkpoints.jsonl`` is.
        save_every: Steps between periodic checkpoints; 0 is none.
        save_every_tokens: Tokens (``elapsed_tokens``) between periodic checkpoints; 0 is none.
        save_every_seconds: Seconds between periodic checkpoints; 0 is none.
        ttl_seconds: Lifetime of periodic checkpoints; ``None`` keeps them.
        rolling_save_every: Steps between rolling checkpoints; 0 is none.
        rolling_ttl_seconds: Lifetime of rolling ones that are not deleted earlier.
        store: Receives each line by ``store.write_checkpoint``; the file is not written then.
        async_periodic_saves: Periodic saves of the ``_async`` methods run in the background; one
            that fails is logged.
    """

    def __init__(
        self,
        training_client: TrainingClient,
        service_client: ServiceClient,
        log_path: str | os.PathLike[str],
        save_every: int = 0,
        save_every_tokens: int = 0,
        save_every_seconds: float = 0.0,
        ttl_seconds: int | None = 604800,
        rolling_save_every: int = 0,
        rolling_ttl_seconds: int = 7200,
        store: Any = None,
        async_periodic_saves: bool = False,
    ) -> None:
        SavePolicy(save_every, save_every_tokens, save_every_seconds)  # raises for those below 0
        self._training_client, self._service_client = training_client, service_client
        self._log_path = log_path
        self._save_every, self._rolling_save_every = save_every, rolling_save_every
        self._save_every_tokens, self._save_every_seconds = save_every_tokens, save_every_seconds
        self._ttl_seconds, self._rolling_ttl_seconds = ttl_seconds, rolling_ttl_seconds
        self._store = store
        self._async_periodic_saves = async_periodic_saves
        self._last_saved_tokens = 0
        self._last_saved_at = time.monotonic()
        self._pending_periodic_task: asyncio.Task[Paths] | None = None
        self._pending_rolling_task: asyncio.Task[None] | None = None
        self._prev_state_path: str | None = None

    def restore_last_saved_tokens(self, last_saved_tokens: int) -> None:
        """Sets the token count at which a resumed run saved its last checkpoint."""
        self._last_saved_tokens = last_saved_tokens

    def should_save_periodic(self, step: int, *, elapsed_tokens: int = 0) -> bool:
        """Returns whether a periodic checkpoint is due after ``step`` steps and so many tokens."""
        # Step 0 has the initial weights.
        if step <= 0:
            return False
        new_tokens = elapsed_tokens - self._last_saved_tokens
        seconds = time.monotonic() - self._last_saved_at
        return (
            (self._save_every > 0 and step % self._save_every == 0)
            or (self._save_every_tokens > 0 and new_tokens >= self._save_every_tokens)
            or (self._save_every_seconds > 0 and seconds >= self._save_every_seconds)
        )

    def save_periodic(self, step: int, loop_state: Mapping[str, Any]) -> Paths:
        """Saves state and sampler weights now; returns ``state_path`` and ``sampler_path``."""
        return run_blocking(self._save(f"{step:06d}", loop_state, "both", self._ttl_seconds))

    async def save_periodic_async(self, step: int, loop_state: Mapping[str, Any]) -> Paths:
        """As :meth:`save_periodic`, awaitable."""
        return await run_async(self._save(f"{step:06d}", loop_state, "both", self._ttl_seconds))

    def maybe_save_rolling(self, step: int, loop_state: Mapping[str, Any]) -> None:
        """Saves a rolling checkpoint if one is due."""
        if self._should_save_rolling(step):
            try:
                run_blocking(self._rolling_steps(step, loop_state))
            except Exception as error:
                logger.warning(_SAVE_FAILED, "rolling", error)

    async def maybe_save_rolling_async(self, step: int, loop_state: Mapping[str, Any]) -> None:
        """Waits for the previous rolling save, and starts one in the background if it is due."""
        # Only one background save runs at a time, so that lines are written in order.
        await self._finish("rolling", self._pending_rolling_task)
        if self._should_save_rolling(step):
            work = run_async(self._rolling_steps(step, loop_state))
            self._pending_rolling_task = asyncio.create_task(work, name=f"rolling_{step:06d}")

    def maybe_save(
        self, step: int, loop_state: Mapping[str, Any], *, elapsed_tokens: int = 0
    ) -> Paths | None:
        """Saves what is due after ``step``; returns the paths of a periodic checkpoint."""
        paths = None
        if self.should_save_periodic(step, elapsed_tokens=elapsed_tokens):
            paths = self.save_periodic(step, loop_state)
            self._last_saved_tokens, self._last_saved_at = elapsed_tokens, time.monotonic()
        self.maybe_save_rolling(step, loop_state)
        return paths

    async def maybe_save_async(
        self, step: int, loop_state: Mapping[str, Any], *, elapsed_tokens: int = 0
    ) -> Paths | None:
        """As :meth:`maybe_save`; with ``async_periodic_saves`` it returns ``None`` at once."""
        paths = None
        if self.should_save_periodic(step, elapsed_tokens=elapsed_tokens):
            if self._async_periodic_saves:
                await self._finish("periodic", self._pending_periodic_task)
                work = self.save_periodic_async(step, loop_state)
                task = asyncio.create_task(work, name=f"periodic_{step:06d}")
                self._pending_periodic_task = task
            else:
                paths = await self.save_periodic_async(step, loop_state)
            # Set last, so that a save that raises is due again.
            self._last_saved_tokens, self._last_saved_at = elapsed_tokens, time.monotonic()
        await self.maybe_save_rolling_async(step, loop_state)
        return paths

    def save_final(self, loop_state: Mapping[str, Any]) -> Paths:
        """Saves ``final``, which is kept, and deletes the last rolling checkpoint."""
        paths = run_blocking(self._save("final", loop_state, "both", None))
        self.finalize()
        return paths

    async def save_final_async(self, loop_state: Mapping[str, Any]) -> Paths:
        """As :meth:`save_final`, after all background saves, so that its line is the last one."""
        await self._finish("periodic", self._pending_periodic_task)
        await self._finish("rolling", self._pending_rolling_task)
        paths = await run_async(self._save("final", loop_state, "both", None))
        await self.finalize_async()
        return paths

    def finalize(self) -> None:
        """Deletes the last rolling checkpoint."""
        run_blocking(self._delete_rolling())

    async def finalize_async(self) -> None:
        """Waits for saves in the background, then deletes the last rolling checkpoint."""
        await self._finish("periodic", self._pending_periodic_task)
        await self._finish("rolling", self._pending_rolling_task)
        await run_async(self._delete_rolling())

    def _should_save_rolling(self, step: int) -> bool:
        every = self._rolling_save_every
        if step <= 0 or every <= 0 or step % every:
            return False
        # The periodic checkpoint of this step is one to resume from too.
        return not (self._save_every > 0 and step % self._save_every == 0)

    def _rolling_steps(
        self, step: int, loop_state: Mapping[str, Any]
    ) -> Generator[Future[Any], Any, None]:
        state = {**loop_state, "rolling": True}
        # The new one is listed before the old one is deleted: a crash always leaves one.
        paths = yield from self._save(f"{step:06d}", state, "state", self._rolling_ttl_seconds)
        yield from self._delete_rolling()
        self._prev_state_path = paths.get("state_path")

    def _save(
        self, name: str, loop_state: Mapping[str, Any], kind: CheckpointKind, ttl: int | None
    ) -> Generator[Future[Any], Any, Paths]:
        pending = submit_checkpoint(
            self._training_client,
            name,
            self._log_path,
            loop_state,
            kind,
            ttl,
            store=self._store,
            overwrite=False,
        )
        paths: Paths = {}
        for key, future in pending.futures.items():
            with pending.explaining(key):
                paths[key] = (yield future).path
        return paths_of(pending.listed(paths))

    def _delete_rolling(self) -> Generator[Future[Any], Any, None]:
        # Forgotten even if the deletion fails: it is tried once.
        path, self._prev_state_path = self._prev_state_path, None
        if path is None:
            return
        try:
            yield self._service_client.create_rest_client().delete_checkpoint_from_tinker_path(path)
        except Exception as error:  # it expires by its TTL
            logger.warning("rolling checkpoint %s was not deleted: %s", path, error)

    async def _finish(self, kind: str, task: asyncio.Task[Any] | None) -> None:
        """Waits for a save in the background; one that failed is logged, once."""
        # Cleared before the wait, so that an error is reported once.
        if kind == "rolling":
            self._pending_rolling_task = None
        else:
            self._pending_periodic_task = None
        if task is not None:
            try:
                await task
            except Exception as error:
                logger.warning(_SAVE_FAILED, kind, error)
