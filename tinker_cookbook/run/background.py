"""Writing files of a run in a thread, so that training does not wait."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from tinker_cookbook.exceptions import TinkerCookbookError

logger = logging.getLogger(__name__)

# At most this many calls wait, so that their data do not fill the memory; a step has two.
_MAX_PENDING = 4


class BackgroundWriter:
    """Runs calls one after the other in a thread named ``name``."""

    def __init__(self, name: str) -> None:
        self._pending: deque[Future[None]] = deque()
        # A single thread, so that steps are written in order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queues a call; blocks only while four earlier ones wait.

        Raises the error of an earlier call, which ends the run here.
        """
        while self._pending and (self._pending[0].done() or len(self._pending) >= _MAX_PENDING):
            self._pending.popleft().result()
        future = self._thread.submit(work)
        self._pending.append(future)
        return future

    def flush(self) -> None:
        """Waits until everything is written; raises the error of a call that failed."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Waits until everything is written and ends the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except TinkerCookbookError as second:
            if error is None:
                raise
            # The caller must see the error of the block.
            logger.warning("while handling %r: %s", error, second)
