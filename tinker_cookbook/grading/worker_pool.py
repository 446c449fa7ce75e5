"""Worker processes for calls that may never return.

``math_verify`` checks with sympy whether two expressions are equal. For an answer such as
``9^{9^{9^9}}`` this may take forever or all memory, and a thread cannot be stopped. So the
comparison runs in worker processes; a worker that takes too long is killed and replaced.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import process, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.imports import pebble

DEFAULT_TIMEOUT_SECONDS = 5.0
# Evaluating an expression may also use all memory; then only the worker dies.
_WORKER_MEMORY_BYTES = 2 << 30
_ORPHAN_SECONDS = 2.0  # seconds after the timeout until a worker without a parent exits

T = TypeVar("T")


class _WorkerProcess(SpawnProcess):
    """A spawned process that does not run the main file.

    By default, a spawned process first imports the main file. A script without ``if __name__ ==
    "__main__":`` would then start again from its first line in every worker.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        thread, original = threading.get_ident(), spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            data = original(name)
            # Do not affect processes that other threads start at the same time.
            if threading.get_ident() != thread:
                return data
            return {key: data[key] for key in data if not key.startswith("init_main")}

        with _starting:
            spawn.get_preparation_data = without_main
            try:
                return SpawnProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                spawn.get_preparation_data = original


class _WorkerContext(SpawnContext):
    Process = _WorkerProcess


_starting = threading.Lock()


class TimedPool:
    """Pool of worker processes for calls that may never return.

    Workers start at the first call and end with the program. They are spawned, not forked,
    because the engine's threads do not survive a fork; so functions and arguments must be
    picklable. The main file is imported only by workers for functions that are defined in it.
    """

    def __init__(
        self,
        max_workers: int = min(4, os.cpu_count() or 1),
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        preload: Sequence[str] = (),
    ) -> None:
        """A worker imports the installed modules of ``preload`` before its first call, so that a
        slow import does not count as a slow answer."""
        self._max_workers = max_workers
        self._timeout_seconds = timeout_seconds
        self._preload = tuple(preload)
        # Both call methods may start the pool, from different threads.
        self._lock = threading.Lock()
        # Key: whether the workers import the main file.
        self._pools: dict[bool, pebble.ProcessPool] = {}

    async def call(
        self, function: Callable[..., T], *args: Any, timeout_seconds: float | None = None
    ) -> T:
        """Returns ``function(*args)``, computed in a worker. Cancelling the caller stops the call.

        The timeout (default: the pool's) starts when a worker starts the call. Raises
        ``TimeoutError`` after it, and ``pebble.ProcessExpired`` if the worker died, for example for
        lack of memory.
        """
        # Starting processes takes a while, scheduling does not.
        await asyncio.to_thread(self._start, _is_in_main(function, *args))
        try:
            return await asyncio.wrap_future(self._schedule(function, args, timeout_seconds))
        except BrokenProcessPool:
            # A worker ended while no call ran, as when this process was stopped for a while and the
            # worker's own timer ended it. pebble gives up all calls then.
            return await asyncio.wrap_future(self._schedule(function, args, timeout_seconds))

    def call_blocking(
        self, function: Callable[..., T], *args: Any, timeout_seconds: float | None = None
    ) -> T:
        """Synchronous version of :meth:`call`."""
        return self._schedule(function, args, timeout_seconds).result()

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
        if pools:
            atexit.unregister(self.close)
        for pool in pools:
            # ``stop``, because ``close`` would wait for calls that may hang.
            pool.stop()
            pool.join()

    def _schedule(
        self, function: Callable[..., T], args: tuple[Any, ...], timeout_seconds: float | None
    ) -> pebble.ProcessFuture:
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if not 0 < limit < float("inf"):
            raise ConfigurationError(
                f"timeout_seconds: got {limit}, expected a finite number above 0, since a call "
                "that never returns would block its worker forever"
            )
        pool = self._start(_is_in_main(function, *args))
        return pool.schedule(_run, args=(function, args, limit), timeout=limit)

    def _start(self, imports_main: bool = False) -> pebble.ProcessPool:
        with self._lock:
            if (pool := self._pools.get(imports_main)) is not None and pool.active:
                return pool
            # True while a worker imports the main file, when it cannot start workers itself.
            if getattr(process.current_process(), "_inheriting", False):
                raise ConfigurationError(
                    "a worker process imports the main file, which starts the program again; "
                    'expected the program below `if __name__ == "__main__":`, or the function that '
                    "the worker calls in another file"
                )
            context = multiprocessing.get_context("spawn") if imports_main else _WorkerContext()
            pool = self._pools[imports_main] = pebble.ProcessPool(
                max_workers=self._max_workers,
                initializer=_prepare_worker,
                initargs=(self._preload,),
                context=context,  # pyright: ignore[reportArgumentType]
            )
            pool.schedule(int)  # pebble starts processes at the first call
            atexit.unregister(self.close)
            atexit.register(self.close)
            return pool


def _is_in_main(*values: Any) -> bool:
    """Returns whether one of these functions or objects is defined in the main file."""
    for value in values:
        if isinstance(value, partial):
            if _is_in_main(value.func, *value.args, *value.keywords.values()):
                return True
        # In a worker, the main file has the second name.
        elif (getattr(value, "__module__", None) or type(value).__module__) in (
            "__main__",
            "__mp_main__",
        ):
            return True
    return False


def _prepare_worker(preload: Sequence[str]) -> None:
    # The main process handles Ctrl-C and stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Import before the first call, so that its timeout does not include the import.
    for module in preload:
        if find_spec(module) is not None:
            import_module(module)
    if find_spec("resource") is not None:  # Windows has no such limit
        import resource

        # A process cannot exceed its hard limit (negative: no limit).
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _WORKER_MEMORY_BYTES if hard < 0 else min(hard, _WORKER_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _run(function: Callable[..., T], args: tuple[Any, ...], limit: float) -> T:
    # If the main process was killed, only this timer stops a call that hangs.
    if not hasattr(signal, "setitimer"):
        return function(*args)
    # The default action of SIGALRM ends the process, even inside code that never returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit + _ORPHAN_SECONDS)
    try:
        return function(*args)
    finally:
        # The worker continues with other calls.
        signal.setitimer(signal.ITIMER_REAL, 0)
