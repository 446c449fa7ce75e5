"""The order of one model's operations: that of their sequence ids, whatever order they arrive in.

A client posts the parts of a large batch at the same time, the first of them last, and sends a
request again when its acknowledgement got lost. So an operation waits until those before it have
begun; where one never comes (its client gave up), the next goes on after ``GAP_SECONDS``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

GAP_SECONDS = 60.0
FIRST = 1  # clients count from here


@dataclass(frozen=True)
class _Operation:
    begin: Callable[[], None]
    blocks: bool


class OrderedDispatcher:
    """Begins operations in their order, none while another is beginning.

    What ``blocks``, because it reads a file, begins in a thread. The others only hand work to the
    engine, and begin on the event loop, at once where it is their turn.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: dict[int, _Operation] = {}
        self._next = FIRST
        self._beginning = False
        self._arrived = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, number: int, begin: Callable[[], None], *, blocks: bool) -> None:
        """Takes an operation in; one that comes late begins at once."""
        self._waiting[number] = _Operation(begin, blocks)
        while not self._beginning:
            first = min(self._waiting, default=None)
            if first is None or first > self._next or self._waiting[first].blocks:
                break
            self._take(first).begin()
        if self._waiting:
            self._arrived.set()

    def give_up(self, number: int) -> None:
        """Nothing comes with this number: those after it need not wait for it."""
        if number >= self._next and number not in self._waiting:
            self.add(number, _nothing, blocks=False)

    def close(self) -> None:
        """Begins nothing more."""
        self._task.cancel()
        self._waiting.clear()

    def _take(self, number: int) -> _Operation:
        self._next = max(self._next, number + 1)
        return self._waiting.pop(number)

    async def _run(self) -> None:
        """Begins those that block, and goes on where a number never comes."""
        while True:
            operation = self._take(await self._turn())
            if not operation.blocks:
                operation.begin()
                continue
            self._beginning = True
            await asyncio.to_thread(operation.begin)
            self._beginning = False

    async def _turn(self) -> int:
        """The operation to begin next, when it is there."""
        loop = asyncio.get_running_loop()
        missing, until = None, 0.0
        while True:
            first = min(self._waiting, default=None)
            if first is not None and first <= self._next:
                return first
            self._arrived.clear()
            if first is None:
                missing = None
                await self._arrived.wait()
                continue
            if missing != self._next:  # whatever else arrives meanwhile, it is not waited longer
                missing, until = self._next, loop.time() + GAP_SECONDS
            try:
                await asyncio.wait_for(self._arrived.wait(), until - loop.time())
            except TimeoutError:
                if self._waiting and missing == self._next:
                    first = min(self._waiting)
                    logger.warning(
                        "%s: request %d never came; going on with %d", self._name, missing, first
                    )
                    return first


def _nothing() -> None:
    """The operation that was refused."""
