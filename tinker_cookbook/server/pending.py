"""Results to come: what a client that was told a request id asks for later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tinker_cookbook.engine.memory import out_of_memory
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.server.errors import memory_full, plain

T = TypeVar("T")

logger = logging.getLogger(__name__)

KEPT_SECONDS = 60.0
"""How long a result that was fetched stays: the answer may have been lost on its way."""


class Encoder(Protocol):
    """How a result goes over the wire: as JSON, or where the client can, as protobuf."""

    def json(self, result: Any) -> dict[str, Any]:
        """The object of the answer."""
        ...

    def proto(self, result: Any) -> bytes | None:
        """The message of the answer; None where only JSON is defined."""
        ...


class AsJson:
    """Results of the SDK's own types that have no binary form."""

    def __init__(self, **more: Any) -> None:
        self._more = more

    def json(self, result: Any) -> dict[str, Any]:
        """The fields of ``result`` and those given here."""
        found = {} if result is None else result.model_dump(mode="json", exclude_none=True)
        return {**found, **self._more}

    def proto(self, result: Any) -> bytes | None:
        """None: there is none."""
        return None


@dataclass(eq=False)
class Pending:
    """One request: its future, and how to encode what comes of it."""

    request_id: str
    session_id: str
    encoder: Encoder
    future: Future[Any] = field(default_factory=Future)
    fetched_at: float | None = None
    _begun: Future[Any] | None = None

    def follow(self, begin: Callable[[], Future[Any]]) -> None:
        """Takes over the result of ``begin()``, or the error that kept it from beginning."""
        if self.future.cancelled():
            return
        try:
            self._begun = begin()
        except Exception as error:
            self.fail(error)
            return
        self._begun.add_done_callback(self._take)

    def when_done(self, note: Callable[[Any], None]) -> None:
        """Calls ``note(result)`` if it succeeds."""
        when_done(self.future, note)

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, of which the words are kept and not the frames: they hold the
        tensors of what failed for as long as the error may be asked for."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
        if not _is_known(error):
            logger.error("%s failed", self.request_id, exc_info=error)
        plain(error)

    def in_hand(self) -> bool:
        """Whether the engine is at it right now."""
        begun = self._begun
        return begun is not None and begun.running()

    def cancel(self) -> None:
        """Takes the request back, if it has not ended."""
        self.future.cancel()
        if self._begun is not None:
            self._begun.cancel()

    def _take(self, begun: Future[Any]) -> None:
        self._begun = None
        try:
            result = begun.result()
        except CancelledError:
            self.future.cancel()
        except BaseException as error:
            self.fail(error)
        else:
            if not self.future.done() and self.future.set_running_or_notify_cancel():
                self.future.set_result(result)


def when_done(future: Future[T], note: Callable[[T], None]) -> None:
    """Calls ``note(result)`` if ``future`` succeeds."""

    def look(done: Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            note(done.result())

    future.add_done_callback(look)


class RequestRegistry:
    """All requests that may still be asked for."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def get(self, request_id: str) -> Pending | None:
        """The request of this id."""
        return self._pending.get(request_id)

    def add(self, pending: Pending) -> Pending:
        """Keeps a request until it was fetched, or its session ends."""
        self._pending[pending.request_id] = pending
        return pending

    def running(self) -> int:
        """How many have not ended."""
        return sum(not one.future.done() for one in self._pending.values())

    def sweep(self, now: float | None = None) -> None:
        """Drops what was fetched a while ago."""
        now = time.monotonic() if now is None else now
        for pending in list(self._pending.values()):
            if pending.fetched_at is not None and now - pending.fetched_at > KEPT_SECONDS:
                del self._pending[pending.request_id]

    def drop_session(self, session_id: str) -> None:
        """Takes back and forgets all requests of a session."""
        for pending in list(self._pending.values()):
            if pending.session_id == session_id:
                del self._pending[pending.request_id]
                pending.cancel()


def error_of(error: BaseException) -> dict[str, str]:
    """The protocol's answer for a failed request. ``user`` errors are not worth a retry."""
    if isinstance(error, CancelledError):
        return {"error": "the request was cancelled", "category": "user"}
    if _is_known(error):
        return {"error": str(error), "category": "user"}
    text = memory_full(error) if out_of_memory(error) else f"{type(error).__name__}: {error}"
    return {"error": text, "category": "server"}


def _is_known(error: BaseException) -> bool:
    return isinstance(error, (TinkerCookbookError, ValueError))
