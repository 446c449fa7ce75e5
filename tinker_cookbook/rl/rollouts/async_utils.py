"""Timeouts and cancellation that hold even where the awaited code blocks or ignores them.

Code of users and of models may raise errors that are no ``Exception``: ``sys.exit()``, or the
cancellation of a task of its own. In a task asyncio takes these for the end of the program or of
the task, so each function here raises an ``EscapedError`` instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_GRACE_SECONDS = 2.0
"""Time that a cancelled task gets to clean up before it is abandoned."""

# A running task needs a reference, or it may be garbage-collected.
_abandoned: set[asyncio.Future[Any]] = set()


class EscapedError(Exception):
    """Raised instead of its cause, an error that code awaiting it would not handle as an error."""


def as_exception(error: BaseException) -> Exception:
    """Returns the error, or an ``EscapedError`` with this cause if it is no ordinary exception."""
    # A StopIteration is an Exception, but neither a future nor a coroutine can raise it.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error})"
    elif isinstance(error, asyncio.CancelledError):
        text = "its own work was cancelled"
    else:
        text = str(error) or type(error).__name__
    escaped = EscapedError(text)
    escaped.__cause__ = error
    return escaped


def ends_task(error: BaseException) -> bool:
    """Returns whether the error must be passed on: Ctrl-C, or a cancellation of the current task.

    A library may raise ``CancelledError`` although this task was not cancelled.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs: the coroutine is closed
        return True
    if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None:
        return True
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, BaseExceptionGroup)):
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt)


async def contained(work: Awaitable[T]) -> T:
    """Awaits ``work``; raises an ``EscapedError`` for what would end the task or the program."""
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        if ends_task(error):
            raise
        raise as_exception(error) from error


def contained_task(work: Awaitable[T]) -> asyncio.Task[T]:
    """Returns a task of :func:`contained`."""
    # The name tells in warnings what the task runs.
    task = asyncio.create_task(contained(work), name=getattr(work, "__qualname__", None))
    if isinstance(work, Coroutine):
        # No effect, unless the task was cancelled before it began.
        task.add_done_callback(lambda _: work.close())
    return task


def bounded(
    work: Awaitable[T], seconds: float | None, error: Callable[[], Exception]
) -> Awaitable[T]:
    """Returns an awaitable that cancels ``work`` after ``seconds`` and raises ``error()``.

    Work that ignores the cancellation is abandoned with a warning.
    """
    # Without a timeout there is nothing to add, not even a frame in the traceback.
    return work if seconds is None else _bounded(work, seconds, error)


async def _bounded(work: Awaitable[T], seconds: float, error: Callable[[], Exception]) -> T:
    task = contained_task(work)
    try:
        # Unlike wait_for, wait returns at the timeout even if the task ignores its cancellation.
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel_within_grace([task])
        raise
    if done:
        return task.result()
    await _cancel_within_grace([task])
    raise error()


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Runs ``asyncio.gather``, but the first error cancels the others before it is raised."""
    tasks = [contained_task(awaitable) for awaitable in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel_within_grace([task for task in tasks if not task.done()])


async def finished(work: Awaitable[T]) -> T:
    """Awaits ``work`` to its end; a cancellation of the caller is raised after that."""
    # The task is not cancelled with its caller, who waits for it again after each cancellation.
    task = contained_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if not cancelled:
        return task.result()
    # The cancellation is raised, so an error of the work can only be logged.
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed while its caller was cancelled", task, exc_info=error)
    raise asyncio.CancelledError


async def stop_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels unfinished tasks, and retrieves errors of finished ones, which asyncio would log."""
    pending = []
    for task in tasks:
        if not task.done():
            pending.append(task)
        elif not task.cancelled():
            task.exception()
    await _cancel_within_grace(pending)


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits, without a time limit, until they have cleaned up."""
    tasks = list(tasks)
    for task in tasks:
        # A second cancellation would interrupt the cleanup that the first one began.
        if not (isinstance(task, asyncio.Task) and task.cancelling()):
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _cancel_within_grace(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    # Code that catches the cancellation must not block the run, so the wait is limited.
    done, stubborn = await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
    for task in done:
        if not task.cancelled():
            task.exception()  # or asyncio would log it: an error during the cancellation
    for task in stubborn:
        logger.warning("%s ignored its cancellation and is abandoned", task)
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)


class Slots:
    """Limit on concurrent calls, on each event loop."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        # A semaphore belongs to one event loop; groups may run on several.
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def one(self) -> AbstractAsyncContextManager[Any]:
        """Returns a context manager that waits for a free slot."""
        if self._limit is None:
            return nullcontext()
        return self._of_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))


_slots = Slots(min(32, (os.cpu_count() or 1) + 4))


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does the same as ``asyncio.to_thread``, with an ``EscapedError`` for what it cannot raise."""

    def work() -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if (raised := as_exception(error)) is error:
                raise
            raise raised from error

    return await asyncio.to_thread(work)


async def run_in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs code that may never return, such as a grader or an input prompt, in a daemon thread.

    ``asyncio.to_thread`` would keep the event loop and the program from ending until the code
    returns. As many threads run at once as in asyncio's pool; a cancelled call no longer counts.
    """
    async with _slots.one():
        return await run_in_new_thread(function, *args, **kwargs)


async def run_in_new_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does the same without a limit on the number of threads; the caller sets one."""
    # The thread sees the context variables of the caller.
    context = contextvars.copy_context()
    done: Future[T] = Future()

    def work() -> None:
        # The caller was cancelled before the thread began.
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as error:
            done.set_exception(as_exception(error))
        else:
            done.set_result(result)

    threading.Thread(target=work, name="rollout-work", daemon=True).start()
    return await asyncio.wrap_future(done)
