"""Where groups are played: on the caller's event loop, or in the threads or processes of a pool.

One event loop plays thousands of episodes that wait for answers. A pool helps where environments
compute much themselves. A local sampling client lives in the process of its engine, so it can be
shared by threads and not by processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from concurrent.futures import Executor, ProcessPoolExecutor
from contextvars import ContextVar, Token
from typing import Any

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.rollouts.hooks import RolloutHooks
from tinker_cookbook.rl.rollouts.presets import RolloutConfig
from tinker_cookbook.rl.rollouts.strategy import RolloutStrategy
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup

_executor: ContextVar[Executor | None] = ContextVar("rollout_executor", default=None)


def set_rollout_executor(executor: Executor | None) -> Token[Executor | None]:
    """Has groups played in ``executor`` from here on in this context; ``None`` plays them inline.

    Args:
        executor: Any; a process pool must start its processes by "spawn".

    Raises:
        ConfigurationError: A process pool that forks: a fork copies the locks of torch and of the
            tokenizers as they happen to be, and hangs on them.
    """
    if isinstance(executor, ProcessPoolExecutor):
        context: Any = getattr(executor, "_mp_context", None)
        method = context.get_start_method() if context is not None else "unknown"
        if method != "spawn":
            raise ConfigurationError(
                f"rollout_executor: got a process pool with start method {method!r}, expected "
                "'spawn'; make it as ProcessPoolExecutor(n, "
                "mp_context=multiprocessing.get_context('spawn'))"
            )
    return _executor.set(executor)


def get_rollout_executor() -> Executor | None:
    """The executor of this context, ``None`` where groups are played inline."""
    return _executor.get()


async def run_group(
    builder: EnvGroupBuilder,
    policy: TokenCompleter,
    *,
    strategy: RolloutStrategy | None = None,
    config: RolloutConfig | None = None,
    hooks: RolloutHooks | None = None,
) -> TrajectoryGroup:
    """``do_group_rollout`` in the context's executor. Cancelling it cancels the rollout, but for
    one that another process has begun, whose result is dropped.

    Raises:
        ConfigurationError: Builder, policy or settings cannot travel to another process.
    """
    executor = get_rollout_executor()
    settings: dict[str, Any] = {"strategy": strategy, "config": config, "hooks": hooks}
    if executor is None:
        return await do_group_rollout(builder, policy, **settings)
    if isinstance(executor, ProcessPoolExecutor):
        parts = (
            _pickled(builder, "the group's builder"),
            _pickled(policy, "the policy"),
            _pickled(settings, "strategy, config and hooks"),
        )
        return await asyncio.wrap_future(executor.submit(_run_pickled, *parts))
    thread = _ThreadRun(builder, policy, settings)
    future = executor.submit(contextvars.copy_context().run, thread.play)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        thread.cancel()
        raise


class _ThreadRun:
    """One group on an event loop of its own, which can be cancelled from another thread."""

    def __init__(
        self, builder: EnvGroupBuilder, policy: TokenCompleter, settings: dict[str, Any]
    ) -> None:
        self._builder = builder
        self._policy = policy
        self._settings = settings
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancelled = False

    def play(self) -> TrajectoryGroup:
        return asyncio.run(self._play())

    def cancel(self) -> None:
        self._cancelled = True
        if self._running is not None:
            loop, task = self._running
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:  # the loop has just ended, and the rollout with it
                return

    async def _play(self) -> TrajectoryGroup:
        task = asyncio.current_task()
        assert task is not None
        self._running = (asyncio.get_running_loop(), task)
        if self._cancelled:
            raise asyncio.CancelledError
        return await do_group_rollout(self._builder, self._policy, **self._settings)


def _run_pickled(builder: bytes, policy: bytes, settings: bytes) -> TrajectoryGroup:
    return asyncio.run(
        do_group_rollout(pickle.loads(builder), pickle.loads(policy), **pickle.loads(settings))
    )


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        client = getattr(value, "sampling_client", None)
        if type(client).__module__.startswith("tinker_cookbook.backends.local"):
            raise ConfigurationError(
                f"rollout_executor: {what} samples from the local engine, which lives in this "
                "process, so groups cannot be played in others; use a ThreadPoolExecutor or none, "
                "or a remote backend"
            ) from error
        raise ConfigurationError(
            f"rollout_executor: {what} ({type(value).__name__}) cannot be pickled for another "
            f"process: {error}; make it of classes and functions at the top of a module, or use a "
            "ThreadPoolExecutor"
        ) from error
