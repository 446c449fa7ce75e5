"""Requests in flight: their results, and the order of operations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tinker_cookbook.engine.memory import out_of_memory
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.server.errors import drop_tracebacks, memory_full_message
from tinker_cookbook.server.metrics import count_error

logger = logging.getLogger(__name__)

# Seconds that an operation waits for a missing earlier sequence id.
GAP_SECONDS = 60.0
FIRST_SEQ_ID = 1

Encode: TypeAlias = Callable[[Any], "bytes | dict[str, Any]"]
"""Returns the response for a result: a protobuf message, or a JSON object."""


@dataclass
class Usage:
    """Base model and tokens of a request: routes set ``request.state.usage`` for the access log."""

    model: str | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None


@dataclass(eq=False)
class PendingRequest:
    """Acknowledged request with its result or error, kept until the client has fetched it."""

    request_id: str
    session_id: str
    encode: Encode
    usage: Usage = field(default_factory=Usage)
    future: Future[Any] = field(default_factory=Future)
    fetched_at: float | None = None
    work: Future[Any] | None = None
    """The engine's future while it works on the request."""

    def start(self, begin: Callable[[], Future[Any]]) -> None:
        """Calls ``begin`` and takes its future's outcome, or the error that it raises."""
        # The request may have been cancelled while it was queued.
        if self.future.cancelled():
            return
        try:
            self.work = begin()
        except Exception as error:
            # Store the error as the result; raising it here would stop the dispatcher.
            self.work = Future()
            self.work.set_exception(error)
        self.work.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Cancels the request if it has not ended."""
        # Cancel both, since running work may refuse the cancellation.
        self.future.cancel()
        if self.work is not None:
            self.work.cancel()

    def _finish(self, work: Future[Any]) -> None:
        # The request is kept until its result is fetched; release the engine's work now.
        self.work = None
        if work.cancelled():
            self.future.cancel()
            return
        error = work.exception()
        if isinstance(error, CancelledError):
            self.future.cancel()
            return
        # The client shows user errors; only server errors need the server's log.
        if error is not None:
            by_user = _is_user_error(error)
            count_error(error, "user" if by_user else "server")
            if not by_user:
                logger.error("%s failed", self.request_id, exc_info=error)
        # Another thread may have cancelled it; setting a second result would raise.
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            if error is None:
                self.future.set_result(work.result())
            else:
                self.future.set_exception(
                    drop_tracebacks(error)
                )  # kept until fetched, so it must not hold frames


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


class OrderedDispatcher:
    """Starts the operations of a model in the order of their sequence ids.

    A client posts the parts of a large batch concurrently, the first part last, and repeats a
    request if its acknowledgement is lost. So an operation waits until all earlier ones have
    started; if one never arrives, the next starts after ``GAP_SECONDS``. No operation starts while
    another one is starting. Operations that block, because they read a file, start in a thread;
    the others only submit work to the engine and start on the event loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[Callable[[], None], bool]] = {}  # begin, blocks
        self._next = FIRST_SEQ_ID
        self._beginning: asyncio.Future[None] | None = None  # in a thread
        self._gap: tuple[int, asyncio.TimerHandle] | None = None  # the missing id and its timer

    def add(self, seq_id: int, begin: Callable[[], None], *, blocks: bool) -> None:
        """Adds an operation; a late one starts immediately."""
        self._waiting[seq_id] = begin, blocks
        self._begin_ready()

    def skip(self, seq_id: int) -> None:
        """Skips the sequence id of a refused request, so that later operations do not wait for
        it."""
        if seq_id >= self._next and seq_id not in self._waiting:
            self.add(seq_id, lambda: None, blocks=False)

    def close(self) -> None:
        """Drops operations that have not started."""
        self._waiting.clear()
        self._end_gap()

    def _begin_ready(self) -> None:
        """Starts the next operations in order, or the timer for a missing one."""
        # One at a time: while an operation starts in a thread, the others wait.
        while self._waiting and self._beginning is None:
            first = min(self._waiting)
            if first > self._next:
                # Other arrivals do not extend the wait for a missing id.
                if self._gap is None or self._gap[0] != self._next:
                    self._end_gap()
                    timer = self._loop.call_later(GAP_SECONDS, self._pass_gap)
                    self._gap = self._next, timer
                return
            # A late operation must not move the next sequence id back.
            self._next = max(self._next, first + 1)
            begin, blocks = self._waiting.pop(first)
            if blocks:
                self._beginning = self._loop.run_in_executor(None, begin)
                self._beginning.add_done_callback(self._end_beginning)
            else:
                begin()
        # No operation is waiting for a missing id now.
        if not self._waiting:
            self._end_gap()

    def _end_beginning(self, done: asyncio.Future[None]) -> None:
        self._beginning = None
        self._begin_ready()

    def _pass_gap(self) -> None:
        missing, first = self._gap and self._gap[0], min(self._waiting, default=self._next)
        self._gap = None
        if missing == self._next < first:  # otherwise it has arrived meanwhile
            message = "%s: request %d never arrived; continuing with %d"
            logger.warning(message, self._name, missing, first)
            self._next = first
        self._begin_ready()

    def _end_gap(self) -> None:
        if self._gap is not None:
            self._gap[1].cancel()
            self._gap = None
