"""Requests in flight: their results, the quota of queued samples, and the order of operations."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.engine.memory import out_of_memory
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.server.errors import BusyError, drop_tracebacks, memory_full_message

logger = logging.getLogger(__name__)

# How long a fetched result is retained: the client may not have received the response.
RETENTION_SECONDS = 60.0
# How long an operation waits for a missing sequence id before it.
GAP_SECONDS = 60.0
FIRST_SEQ_ID = 1


class Encoder:
    """Encoder of results. The base class encodes the SDK's own types, with constant fields."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def json(self, result: Any) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        dumped = {} if result is None else result.model_dump(mode="json", exclude_none=True)
        return {**dumped, **self._fields}

    def proto(self, result: Any) -> bytes | None:
        """Returns the result as a protobuf message; None if only JSON is defined."""
        return None


@dataclass(eq=False)
class PendingRequest:
    """Acknowledged request, its future and the encoder of its result."""

    request_id: str
    session_id: str
    encoder: Encoder
    future: Future[Any] = field(default_factory=Future)
    fetched_at: float | None = None
    _work: Future[Any] | None = None

    def start(self, begin: Callable[[], Future[Any]]) -> None:
        """Calls ``begin`` and takes its future's outcome, or the error that it raises."""
        # The request may have been cancelled while it waited for its turn.
        if self.future.cancelled():
            return
        try:
            self._work = begin()
        except Exception as error:
            self._fail(error)
            return
        self._work.add_done_callback(self._finish)

    def on_success(self, callback: Callable[[Any], None]) -> None:
        """Calls ``callback(result)`` if the request succeeds."""

        def done(future: Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                callback(future.result())

        self.future.add_done_callback(done)

    def is_running(self) -> bool:
        """Returns whether the engine works on it right now."""
        work = self._work
        return work is not None and work.running()

    def cancel(self) -> None:
        """Cancels the request if it has not ended."""
        self.future.cancel()
        if self._work is not None:
            self._work.cancel()

    def _fail(self, error: BaseException) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
        if not _is_user_error(error):
            logger.error("%s failed", self.request_id, exc_info=error)
        drop_tracebacks(error)  # the error is retained until it is fetched

    def _finish(self, work: Future[Any]) -> None:
        self._work = None
        try:
            result = work.result()
        except CancelledError:
            self.future.cancel()
        except BaseException as error:
            self._fail(error)
        else:
            if not self.future.done() and self.future.set_running_or_notify_cancel():
                self.future.set_result(result)


class RequestRegistry:
    """Requests by id, until their results are fetched or their session ends."""

    def __init__(self) -> None:
        self._pending: dict[str, PendingRequest] = {}

    def get(self, request_id: str) -> PendingRequest | None:
        """Returns the request of this id."""
        return self._pending.get(request_id)

    def add(self, pending: PendingRequest) -> PendingRequest:
        """Adds a request and returns it."""
        self._pending[pending.request_id] = pending
        return pending

    def running(self) -> int:
        """Returns the number of requests that have not ended."""
        return sum(not pending.future.done() for pending in self._pending.values())

    def sweep(self, now: float | None = None) -> None:
        """Drops requests that were fetched more than ``RETENTION_SECONDS`` ago."""
        now = time.monotonic() if now is None else now
        for pending in list(self._pending.values()):
            if pending.fetched_at is not None and now - pending.fetched_at > RETENTION_SECONDS:
                del self._pending[pending.request_id]

    def drop_session(self, session_id: str) -> None:
        """Cancels and drops all requests of a session."""
        for pending in list(self._pending.values()):
            if pending.session_id == session_id:
                del self._pending[pending.request_id]
                pending.cancel()


def error_body(error: BaseException) -> dict[str, str]:
    """Returns the response for a failed request; clients do not retry ``user`` errors."""
    if isinstance(error, CancelledError):
        return {"error": "the request was cancelled", "category": "user"}
    if _is_user_error(error):
        return {"error": str(error), "category": "user"}
    full = out_of_memory(error)
    text = memory_full_message(error) if full else f"{type(error).__name__}: {error}"
    return {"error": text, "category": "server"}


def _is_user_error(error: BaseException) -> bool:
    return isinstance(error, (TinkerCookbookError, ValueError))


class SampleQuota:
    """Thread-safe count of requested samples that have not ended, over both APIs.

    Args:
        limit: Largest number of queued samples. A single request may exceed it on an idle server.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0

    def acquire(self, samples: int) -> None:
        """Adds samples; raises ``BusyError`` above the limit."""
        with self._lock:
            # A request above the limit runs on an idle server: it would otherwise never run.
            if self.count and self.count + samples > self._limit:
                raise BusyError(
                    f"{self.count} samples wait already, of at most {self._limit} "
                    "(max_queued_samples=); try again"
                )
            self.count += samples

    def release(self, samples: int) -> None:
        """Removes samples that have ended."""
        with self._lock:
            self.count -= samples


class OrderedDispatcher:
    """Dispatcher that begins the operations of a model in the order of their sequence ids.

    A client posts the parts of a large batch concurrently, the first of them last, and repeats a
    request when its acknowledgement is lost. So an operation waits until those before it have
    begun; if one never arrives, the next begins after ``GAP_SECONDS``. No operation begins while
    another one is beginning. Operations that block, because they read a file, begin in a thread;
    the others only submit work to the engine and begin on the event loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: dict[int, tuple[Callable[[], None], bool]] = {}  # begin, blocks
        self._next = FIRST_SEQ_ID
        self._beginning = False
        self._arrived = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, seq_id: int, begin: Callable[[], None], *, blocks: bool) -> None:
        """Adds an operation; a late one begins at once."""
        self._waiting[seq_id] = begin, blocks
        # Operations that do not block begin here if all those before them have begun.
        while not self._beginning:
            first = min(self._waiting, default=None)
            if first is None or first > self._next or self._waiting[first][1]:
                break
            self._pop(first)[0]()
        if self._waiting:
            self._arrived.set()

    def skip(self, seq_id: int) -> None:
        """Skips a sequence id whose request was refused: later operations do not wait for it."""
        if seq_id >= self._next and seq_id not in self._waiting:
            self.add(seq_id, lambda: None, blocks=False)

    def close(self) -> None:
        """Drops the operations that have not begun."""
        self._task.cancel()
        self._waiting.clear()

    def _pop(self, seq_id: int) -> tuple[Callable[[], None], bool]:
        # A late operation does not move the next sequence id back.
        self._next = max(self._next, seq_id + 1)
        return self._waiting.pop(seq_id)

    async def _run(self) -> None:
        """Begins operations that block, and those after a gap."""
        while True:
            begin, blocks = self._pop(await self._next_ready())
            if not blocks:
                begin()
                continue
            # ``add`` must not begin operations while this one is in its thread.
            self._beginning = True
            await asyncio.to_thread(begin)
            self._beginning = False

    async def _next_ready(self) -> int:
        """Waits for the next operation to begin; returns its sequence id."""
        loop = asyncio.get_running_loop()
        missing, deadline = None, 0.0
        while True:
            first = min(self._waiting, default=None)
            if first is not None and first <= self._next:
                return first
            self._arrived.clear()
            if first is None:
                missing = None
                await self._arrived.wait()
                continue
            if missing != self._next:  # other arrivals do not extend the wait for this id
                missing, deadline = self._next, loop.time() + GAP_SECONDS
            try:
                await asyncio.wait_for(self._arrived.wait(), deadline - loop.time())
            except TimeoutError:
                if self._waiting and missing == self._next:
                    first = min(self._waiting)
                    logger.warning(
                        "%s: request %d never came; going on with %d", self._name, missing, first
                    )
                    return first
