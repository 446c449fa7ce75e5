"""Waiting that cannot be held up: by code that blocks, or that does not heed being cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_GRACE_SECONDS = 2.0
"""How long code that was told to stop may take to do so."""

_abandoned: set[asyncio.Future[Any]] = set()
"""Tasks that went on when told to stop; held so that they are not collected while running."""


async def bounded(work: Awaitable[T], seconds: float | None, error: Callable[[], Exception]) -> T:
    """Awaits ``work`` for at most ``seconds``, then cancels it and raises ``error()``.

    Work that does not heed the cancellation is left behind with a warning, so the bound holds
    against everything but code that blocks the event loop itself.
    """
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop([task])
        raise
    if done:
        return task.result()
    await _stop([task])
    raise error()


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """As ``asyncio.gather``, but the first error cancels the others before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _stop([task for task in tasks if not task.done()])


async def finished(work: Awaitable[T]) -> T:
    """Awaits ``work`` to its end, though the caller is cancelled meanwhile, even repeatedly.

    The cancellation is raised once the work is done.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if not cancelled:
        return task.result()
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed while its caller was cancelled", task, exc_info=error)
    raise asyncio.CancelledError


async def stop_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels what still runs, and fetches the errors of the rest so that none is reported lost."""
    pending = []
    for task in tasks:
        if not task.done():
            pending.append(task)
        elif not task.cancelled():
            task.exception()
    await _stop(pending)


async def _stop(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    _, stubborn = await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
    for task in stubborn:
        logger.warning("%s did not stop when it was cancelled; it is left behind", task)
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run_in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As ``asyncio.to_thread``, for code that may never return: a grader, a person at a prompt.

    Pool threads are waited for when the loop or the program ends; a daemon thread is not. As many
    run at once as the loop's own pool would have, so that they do not crowd out the loop; one that
    is given up on no longer counts.
    """
    loop = asyncio.get_running_loop()
    slots = _slots.setdefault(loop, asyncio.Semaphore(min(32, (os.cpu_count() or 1) + 4)))
    context = contextvars.copy_context()
    async with slots:
        done: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(function, *args, **kwargs)
            except StopIteration as stop:  # a future cannot hold one
                error = RuntimeError(f"StopIteration: {stop}")
            except BaseException as caught:
                error = caught
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(deliver, result, error)

        threading.Thread(target=work, name="rollout-work", daemon=True).start()
        return await done
