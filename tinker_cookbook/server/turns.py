"""The order of one model's operations: that of their sequence ids, whatever order they arrive in.

A client posts the parts of a large batch at the same time, the first of them last, and sends a
request again when its acknowledgement got lost. So an operation waits until those before it have
begun; where one never comes (its client gave up), the next goes on after ``GAP_SECONDS``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

GAP_SECONDS = 60.0
FIRST = 1  # clients count from here


class Turns:
    """Begins operations in their order, each in a thread, none while another is beginning.

    Beginning is quick (the engine does the work), but may read a file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: dict[int, Callable[[], None]] = {}
        self._next = FIRST
        self._arrived = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, number: int, begin: Callable[[], None]) -> None:
        """Takes an operation in; one that comes late begins at once."""
        self._waiting[number] = begin
        self._arrived.set()

    def close(self) -> None:
        """Begins nothing more."""
        self._task.cancel()
        self._waiting.clear()

    async def _run(self) -> None:
        while True:
            number = await self._turn()
            begin = self._waiting.pop(number)
            self._next = max(self._next, number + 1)
            await asyncio.to_thread(begin)

    async def _turn(self) -> int:
        """The operation to begin next, when it is there."""
        while True:
            first = min(self._waiting, default=None)
            if first is not None and first <= self._next:
                return first
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), None if first is None else GAP_SECONDS)
            except TimeoutError:
                assert first is not None
                logger.warning(
                    "%s: request %d never came; going on with %d", self._name, self._next, first
                )
                return min(self._waiting)
