"""Batches prepared ahead in a background thread, so that tokenising never holds up the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar, cast

from tinker_cookbook.exceptions import ConfigurationError

T = TypeVar("T")

_END: Any = object()


class Prefetcher(Generic[T]):
    """Takes items from an iterable in one background thread, up to ``depth`` ahead, in order::

        with Prefetcher(batches) as ahead:
            batch = await ahead.next()

    ``async for`` and plain ``for`` work too. An error of the iterable is raised at the item where
    it occurred, with the traceback of the thread; nothing follows it. As the iterable runs in one
    thread alone, it may change state between items (call ``dataset.set_epoch``, say).
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        if depth < 1:
            raise ConfigurationError(f"depth: got {depth}, expected at least 1 item ahead")
        self._items: Iterator[T] = iter(items)
        # One future is handed to the thread for each item wanted. Waiting for a future, unlike
        # waiting for a queue, can be called off: no thread is left behind by a cancelled `next`.
        self._wanted: SimpleQueue[Future[T] | None] = SimpleQueue()
        self._ahead: deque[Future[T]] = deque()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()
        for _ in range(depth):
            self._want()

    async def next(self) -> T:
        """The next item, without blocking the event loop; StopAsyncIteration at the end."""
        item = await asyncio.wrap_future(self._take())
        if item is _END:
            self.close()
            raise StopAsyncIteration
        return item

    def close(self) -> None:
        """Stops: an item being prepared is finished and dropped, others are not begun."""
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._wanted.put(None)
        if threading.current_thread() is not self._thread:
            # Long enough for a batch; a source that hangs must not hang the end of the run.
            self._thread.join(timeout=1.0)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return await self.next()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            item = self._take().result()
        except StopAsyncIteration:
            raise StopIteration from None
        if item is _END:
            self.close()
            raise StopIteration
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _want(self) -> None:
        future: Future[T] = Future()
        self._ahead.append(future)
        self._wanted.put(future)

    def _take(self) -> Future[T]:
        if not self._ahead:
            raise StopAsyncIteration
        future = self._ahead.popleft()
        self._want()
        return future

    def _work(self) -> None:
        while (future := self._wanted.get()) is not None:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                item = next(self._items, _END)
            except BaseException as error:  # to be raised where the item is asked for
                self._items = iter(())
                self._deliver(future, error=error)
            else:
                self._deliver(future, item=item)

    @staticmethod
    def _deliver(
        future: Future[T], item: T | None = None, error: BaseException | None = None
    ) -> None:
        # The waiting side may have called it off meanwhile.
        with contextlib.suppress(Exception):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(T, item))
