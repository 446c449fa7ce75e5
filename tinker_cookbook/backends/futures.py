"""Futures of the local clients: awaited in async code, asked ``.result()`` elsewhere.

They are ``tinker.APIFuture``s, so code that checks for the SDK's type takes them. Like all modules
that only ``connect()`` loads, this one may import ``tinker`` at the top.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import Future as ConcurrentFuture
from typing import Any, Generic, TypeVar, cast

import tinker

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C")

_warned_of_blocking = False


class LocalFuture(tinker.APIFuture[T]):
    """The result, to come, of an operation that was handed to the engine.

    Giving up waiting (a timeout, a cancelled task) takes nothing back: the operation runs in its
    turn, as later ones were submitted in the belief that it would. ``future().cancel()`` does take
    it back while it has not begun.
    """

    def __init__(self, future: ConcurrentFuture[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Blocks until the operation is done; raises its error, or ``TimeoutError``.

        In async code await the future instead: this stops the event loop, which is said once.
        """
        return _blocking_result(self._future, timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Waits without blocking the event loop; raises the error, or ``TimeoutError``."""
        return await _wait(self._future, timeout)

    def future(self) -> ConcurrentFuture[T]:
        """Returns the ``concurrent.futures.Future`` beneath."""
        return self._future

    def __repr__(self) -> str:
        return f"<LocalFuture {_describe(self._future)}>"


class SampleFuture(LocalFuture[T]):
    """The samples, or scores, to come, of a request.

    Unlike an operation it stands in no order with others. So once nobody can read the result any
    more, because the future is gone (the task that awaited it was cancelled, say), the request is
    taken back and what it held in the running batch is free.
    """

    def __init__(self, future: ConcurrentFuture[T]) -> None:
        super().__init__(future)
        self._abandon = weakref.finalize(self, future.cancel)
        self._abandon.atexit = False

    def future(self) -> ConcurrentFuture[T]:
        """Returns the ``concurrent.futures.Future`` beneath, which stands for the request from
        now on."""
        self._abandon.detach()
        return self._future


def chain(
    first: ConcurrentFuture[Any],
    then: Callable[[], ConcurrentFuture[T]],
    finish: Callable[[T], R],
) -> ConcurrentFuture[R]:
    """Returns the future of ``finish(then().result())``; ``then`` is called when ``first`` is done.

    Cancelling it, at any time before its end, cancels what ``then`` began.
    """
    out: ConcurrentFuture[R] = ConcurrentFuture()

    def begin(_: ConcurrentFuture[Any]) -> None:
        if out.cancelled():
            return
        try:
            inner = then()
        except BaseException as error:
            _end(out, error=error)
            return
        out.add_done_callback(lambda _: inner.cancel())  # does nothing to one that is done
        inner.add_done_callback(end)

    def end(inner: ConcurrentFuture[T]) -> None:
        try:
            result = finish(inner.result())
        except CancelledError:
            out.cancel()
        except BaseException as error:
            _end(out, error=error)
        else:
            _end(out, result)

    first.add_done_callback(begin)
    return out


def _end(
    future: ConcurrentFuture[Any], result: Any = None, error: BaseException | None = None
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def done_future(value: T) -> LocalFuture[T]:
    """Returns a future that already holds ``value``."""
    future: ConcurrentFuture[T] = ConcurrentFuture()
    future.set_result(value)
    return LocalFuture(future)


class ReadyClient(tinker.APIFuture[C], Generic[C]):
    """Mixin of clients whose creation takes a while but which can be used at once.

    ``class Client(ReadyClient["Client"])``: methods queue behind the creation. ``await client`` and
    ``client.result()`` wait for it, raise its error, and give the client itself, so that code
    written for a future of a client works as well.

    Args:
        creation: finishes when the client exists; its result is not used.
    """

    def __init__(self, creation: ConcurrentFuture[Any]) -> None:
        self._creation = creation

    def result(self, timeout: float | None = None) -> C:
        """Blocks until the client exists; raises what kept it from being created."""
        _blocking_result(self._creation, timeout)
        return cast("C", self)

    async def result_async(self, timeout: float | None = None) -> C:
        """Waits until the client exists; raises what kept it from being created."""
        await _wait(self._creation, timeout)
        return cast("C", self)

    def future(self) -> ConcurrentFuture[C]:
        """Returns a ``concurrent.futures.Future`` of the client. Cancelling it leaves the
        client alone."""
        ready: ConcurrentFuture[C] = ConcurrentFuture()

        def pass_on(creation: ConcurrentFuture[Any]) -> None:
            if not ready.set_running_or_notify_cancel():
                return
            if creation.cancelled():
                ready.set_exception(CancelledError())
            elif (error := creation.exception()) is not None:
                ready.set_exception(error)
            else:
                ready.set_result(cast("C", self))

        self._creation.add_done_callback(pass_on)
        return ready


async def _wait(future: ConcurrentFuture[T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        # Unshielded, a waiter that gives up would cancel the operation in the engine's queue.
        return await asyncio.shield(asyncio.wrap_future(future))


def _blocking_result(future: ConcurrentFuture[T], timeout: float | None) -> T:
    if not future.done():
        _warn_if_it_stops_an_event_loop()
    return future.result(timeout)


def _warn_if_it_stops_an_event_loop() -> None:
    global _warned_of_blocking
    if _warned_of_blocking:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    _warned_of_blocking = True
    warnings.warn(
        ".result() in async code stops the event loop until the result is there: every other task "
        "waits. Write `await future` instead. (Said once.)",
        RuntimeWarning,
        stacklevel=4,
    )


def _describe(future: ConcurrentFuture[Any]) -> str:
    if not future.done():
        return "running" if future.running() else "queued"
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return f"failed: {error!r}" if error is not None else "done"
