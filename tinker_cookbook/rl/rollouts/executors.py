"""Executors of other processes and machines: where a group's rollouts run (docs/scale.md).

Ray has no ``concurrent.futures`` executor, so ``RayExecutor`` implements one with its tasks. Dask
has its own: ``distributed.Client(...).get_executor()``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tinker_cookbook.exceptions import ConfigurationError

T = TypeVar("T")


class RayExecutor(Executor):
    """Runs functions as tasks of a Ray cluster.

    If a worker or machine dies, Ray runs its tasks again elsewhere.

    Args:
        address: Of a running cluster; ``None``: the one that this process is connected to, or a
            new one on this machine.
        max_retries: Times that a task of a dead worker is run again.
        **options: Options of a Ray task, such as ``num_cpus=1`` and ``resources``.

    Raises:
        ConfigurationError: Ray is not installed.
    """

    def __init__(self, address: str | None = None, max_retries: int = 3, **options: Any) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigurationError(
                "RayExecutor: Ray is not installed; run: pip install ray"
            ) from error
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
        self._ray: Any = ray
        # Only the death of a worker is retried: an error of the function is its result.
        self._task = ray.remote(_call).options(max_retries=max_retries, **options)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Starts ``fn``; cancelling the future, at any time, cancels the task."""
        reference = self._task.remote(fn, args, kwargs)
        future: Future[T] = Future()
        future.add_done_callback(partial(self._cancel, reference))
        reference.future().add_done_callback(partial(_copy, future))
        return future

    def _cancel(self, reference: Any, future: Future[Any]) -> None:
        if future.cancelled():
            self._ray.cancel(reference, force=True)


def check_executor(executor: Executor | None) -> None:
    """Raises ``ConfigurationError`` for a process pool whose start method is not "spawn"."""
    # A fork copies the locks of torch and of the tokenizers in their current state, and hangs.
    if isinstance(executor, ProcessPoolExecutor):
        context: Any = getattr(executor, "_mp_context", None)
        method = context.get_start_method() if context is not None else "unknown"
        if method != "spawn":
            raise ConfigurationError(
                f"rollout_executor: got a process pool with start method {method!r}, expected "
                "'spawn'; make it as ProcessPoolExecutor(n, "
                "mp_context=multiprocessing.get_context('spawn'))"
            )


def runs_here(executor: Executor) -> bool:
    """Returns whether functions run in this process; if not, what they get must pickle."""
    return isinstance(executor, ThreadPoolExecutor)


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)


def _copy(outer: Future[Any], inner: Future[Any]) -> None:
    if not outer.set_running_or_notify_cancel():
        return
    error = inner.exception()
    if error is None:
        outer.set_result(inner.result())
    else:
        # Ray wraps an error of the function; strategies look at the error's own class.
        outer.set_exception(getattr(error, "cause", None) or error)
