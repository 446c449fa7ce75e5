"""Futures and base classes of the local clients.

The futures are ``tinker.APIFuture``s, so code that checks for the SDK's type accepts them. Like all
modules that only ``connect()`` loads, this one may import ``tinker`` at the top.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import Future as ConcurrentFuture
from typing import Any, Generic, TypeVar, cast

import tinker

from tinker_cookbook.engine.sampling.requests import settle

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C")

_warned_of_blocking = False


class LocalFuture(tinker.APIFuture[T]):
    """Future result of an operation of the engine.

    A timeout or a cancelled task does not cancel the operation: it still runs, because later
    operations depend on it. ``future().cancel()`` cancels an operation that has not started.
    """

    def __init__(self, future: ConcurrentFuture[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Blocks until the operation is done; raises its error, or ``TimeoutError``.

        In async code await the future instead: this blocks the event loop (warned once).
        """
        global _warned_of_blocking
        # A finished result does not block, so no warning is needed.
        waits = not (self._future.done() or _warned_of_blocking)
        if waits and asyncio._get_running_loop() is not None:
            _warned_of_blocking = True
            warnings.warn(
                ".result() in async code blocks the event loop until the result is ready: every "
                "other task waits. Write `await future` instead. (This warning is shown once.)",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Waits without blocking the event loop; raises the error, or ``TimeoutError``."""
        async with asyncio.timeout(timeout):
            # Without the shield, a cancelled waiter would cancel the operation in the queue.
            return await asyncio.shield(asyncio.wrap_future(self._future))

    def future(self) -> ConcurrentFuture[T]:
        """Returns the underlying ``concurrent.futures.Future``."""
        return self._future

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._future!r}>"


class SampleFuture(LocalFuture[T]):
    """Future result of a sampling or scoring request.

    Requests are independent, so a request is cancelled, and its memory freed, once its result can
    no longer be read: when this object is garbage-collected, for example after a cancelled await.
    """

    def __init__(self, future: ConcurrentFuture[T]) -> None:
        super().__init__(future)
        self._abandon = weakref.finalize(self, future.cancel)
        self._abandon.atexit = False  # the engine cancels all its requests when it closes

    def future(self) -> ConcurrentFuture[T]:
        """Returns the underlying future; disables the cancellation with this object."""
        self._abandon.detach()
        return self._future


def once(callback: Callable[[ConcurrentFuture[Any]], object]) -> Callable[..., None]:
    """Returns a callback for a future that calls ``callback`` once and then releases it.

    A future keeps its callbacks after the call. One that refers to the owner of the future is a
    reference cycle, and its weights and results stay until the garbage collector runs.
    """
    kept = [callback]

    def call(future: ConcurrentFuture[Any]) -> None:
        kept.pop()(future)

    return call


def chain(
    first: ConcurrentFuture[Any],
    then: Callable[[], ConcurrentFuture[T]],
    finish: Callable[[T], R],
) -> ConcurrentFuture[R]:
    """Returns a future of ``finish(then().result())``; calls ``then`` when ``first`` is done.

    Cancelling it before its end also cancels the work of ``then``.
    """
    out: ConcurrentFuture[R] = ConcurrentFuture()

    def begin(_: ConcurrentFuture[Any]) -> None:
        if out.cancelled():  # cancelled during ``first``: do not submit the request
            return
        try:
            inner = then()
        except BaseException as error:
            # concurrent.futures only logs the error of a callback, so ``out`` would never end.
            settle(out, error=error)
            return
        out.add_done_callback(once(lambda _: inner.cancel()))  # no effect once it is done
        inner.add_done_callback(end)

    def end(inner: ConcurrentFuture[T]) -> None:
        try:
            result = finish(inner.result())
        except CancelledError:  # for example, when the engine closes
            out.cancel()
        except BaseException as error:
            settle(out, error=error)
        else:
            settle(out, result)

    # ``first`` may be the creation of the client to which ``then`` refers.
    first.add_done_callback(once(begin))
    return out


def done_future(value: T) -> LocalFuture[T]:
    """Returns a future that already holds ``value``."""
    future: ConcurrentFuture[T] = ConcurrentFuture()
    future.set_result(value)
    return LocalFuture(future)


class AsyncNames:
    """Adds the SDK's older names: ``NAME_async`` for each public method ``NAME``.

    Awaiting such a method returns the result. If ``async_gives_futures`` is set, as in a
    training client, awaiting it returns the future of the request, which is awaited separately.
    """

    async_gives_futures = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            # Keep names that the class or a base class defines.
            public = inspect.isfunction(method) and not name.startswith("_")
            if public and not name.endswith("_async") and not hasattr(cls, f"{name}_async"):
                setattr(cls, f"{name}_async", _async_twin(method))


def _async_twin(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def twin(self: AsyncNames, *args: Any, **kwargs: Any) -> Any:
        out = method(self, *args, **kwargs)
        if self.async_gives_futures and not isinstance(out, ReadyClient):
            return out
        return await out if isinstance(out, tinker.APIFuture) else out

    return twin


class ReadyClient(LocalFuture[C], Generic[C]):
    """Base of clients that can be used before their creation has finished: methods queue behind it.

    ``class Client(ReadyClient["Client"])``: ``await client`` and ``client.result()`` wait for the
    creation, raise its error, and return the client itself, like a future of a client.
    """

    def __init__(self, creation: ConcurrentFuture[Any]) -> None:
        super().__init__(creation)

    def result(self, timeout: float | None = None) -> C:
        """Blocks until the client exists; raises the error of its creation."""
        super().result(timeout)
        return cast("C", self)

    async def result_async(self, timeout: float | None = None) -> C:
        """Waits until the client exists; raises the error of its creation."""
        await super().result_async(timeout)
        return cast("C", self)

    def future(self) -> ConcurrentFuture[C]:
        """Returns a future of the client; cancelling it does not affect the client."""
        # Not the creation itself, because the client's queued operations depend on it.
        ready: ConcurrentFuture[C] = ConcurrentFuture()

        def pass_on(made: ConcurrentFuture[Any]) -> None:
            settle(ready, self, CancelledError() if made.cancelled() else made.exception())

        self._future.add_done_callback(once(pass_on))
        return ready
