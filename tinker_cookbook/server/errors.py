"""Errors of requests and their HTTP statuses.

The SDK retries 408, 409, 429 and 5xx for minutes, so an error that a retry cannot fix gets another
status.
"""

from __future__ import annotations

from typing import TypeVar

from tinker_cookbook.exceptions import BackendError, CheckpointError, TinkerCookbookError

E = TypeVar("E", bound=BaseException)

SERVER_FAILED = "the server failed; its log has the reason"


class NotFoundError(BackendError):
    """An id that does not exist or belongs to another owner: 404.

    Also used for ended sessions and requests, because clients retry 410.
    """


class SessionEndedError(NotFoundError):
    """A session that is not open, or a request of one: its client has to begin a new session."""

    code = "session_ended"


class BusyError(BackendError):
    """Too many queued samples: 429, which clients retry."""


class BodyTooLargeError(BackendError):
    """A request body above the limit: 413."""


def body_too_large(limit: int) -> BodyTooLargeError:
    """Returns the error for a body of more than ``limit`` bytes."""
    return BodyTooLargeError(
        f"body: got more than {limit >> 20} MiB, the largest that this path accepts (data: "
        "max_request_mb=); send fewer datums per request"
    )


def memory_full_message(error: BaseException) -> str:
    """Returns the message for a request that ran out of memory."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"the server's memory is full ({text}). Send a smaller request, or try again later"


def drop_tracebacks(error: E) -> E:
    """Removes the stack frames from an error and its causes: frames keep tensors alive."""
    current: BaseException | None = error
    while current is not None:
        current.__traceback__ = None
        current = current.__cause__ or current.__context__
    return error


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, (NotFoundError, CheckpointError)):
        return 404
    if isinstance(error, BusyError):
        return 429
    if isinstance(error, (BodyTooLargeError, MemoryError)):
        return 413
    if isinstance(error, (TinkerCookbookError, ValueError)):
        return 400
    return 500
