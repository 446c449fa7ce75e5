"""Prefetches batches in a background thread, so that tokenization does not block the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

_END: Any = object()


class Prefetcher(Generic[T]):
    """Prefetches up to ``depth`` items of an iterable in a background thread::

        with Prefetcher(batches) as ahead:
            batch = await ahead.next()

    An error of the iterable is raised at its item, with the traceback of the thread, and ends the
    iteration. The iterable runs in one thread, so it may change state between items (for example
    call ``dataset.set_epoch``).
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        self._items: Iterator[T] = iter(items)
        # The thread receives a future for each requested item. Unlike waiting for a queue, waiting
        # for a future can be cancelled without leaving a thread behind.
        self._requests: SimpleQueue[Future[T] | None] = SimpleQueue()
        self._ahead: deque[Future[T]] = deque()
        # A daemon thread: an iterable that hangs must not block the end of the program.
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()
        for _ in range(depth):
            self._request()

    async def next(self) -> T:
        """Returns the next item without blocking the event loop; StopAsyncIteration at the end."""
        future = self._ahead.popleft()
        # Request immediately, so that ``depth`` items stay in preparation.
        self._request()
        item = await asyncio.wrap_future(future)
        if item is _END:
            raise StopAsyncIteration
        return item

    def close(self) -> None:
        """Stops the thread; drops an item in preparation."""
        for future in self._ahead:
            # The thread skips cancelled requests, so it ends after the item in preparation.
            future.cancel()
        self._requests.put(None)
        # Long enough for a batch; an iterable that hangs must not block the end of the run.
        self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self) -> None:
        self._ahead.append(Future())
        self._requests.put(self._ahead[-1])

    def _work(self) -> None:
        while (future := self._requests.get()) is not None:
            # False for a cancelled future; a running future can no longer be cancelled.
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(next(self._items, _END))
            except BaseException as error:  # raised to the caller that requests the item
                # An error ends the iteration for all later requests.
                self._items = iter(())
                future.set_exception(error)
