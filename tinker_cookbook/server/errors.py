"""Errors of requests, and the statuses they get.

The SDK repeats 408, 409, 429 and all from 500 for minutes, so what cannot get better has another.
"""

from __future__ import annotations

from typing import TypeVar

from tinker_cookbook.exceptions import BackendError, CheckpointError, TinkerCookbookError


class NotThere(BackendError):  # noqa: N818
    """Nothing of that id that this owner may see: 404."""


class Gone(NotThere):
    """A session or request that was there before: 404 too, since 410 asks for a repetition."""


class Busy(BackendError):  # noqa: N818
    """Too much is waiting: 429, the protocol's "try again"."""


class TooLarge(BackendError):  # noqa: N818
    """A body above the limit: 413."""


class NoRoom(MemoryError):  # noqa: N818
    """There is no memory for a body; ``head`` is how it begins."""

    def __init__(self, why: str, head: bytes) -> None:
        super().__init__(why)
        self.head = head


def too_large(limit: int) -> TooLarge:
    """The error of a body of more than ``limit`` bytes."""
    return TooLarge(
        f"body: got more than {limit >> 20} MiB, the most that this server takes at once "
        "(max_request_mb=); send fewer datums a request"
    )


E = TypeVar("E", bound=BaseException)


def memory_full(error: BaseException) -> str:
    """The sentence for a request that found no memory."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"the server's memory is full ({text}). Ask for less at once, or again later"


def plain(error: E) -> E:
    """The error without the frames that it passed through, which hold what they were working on."""
    following: BaseException | None = error
    while following is not None:
        following.__traceback__ = None
        following = following.__cause__ or following.__context__
    return error


def status_of(error: Exception) -> int:
    """The HTTP status of an error that is said at once."""
    if isinstance(error, (NotThere, CheckpointError)):
        return 404
    if isinstance(error, Busy):
        return 429
    if isinstance(error, (TooLarge, MemoryError)):
        return 413
    if isinstance(error, (TinkerCookbookError, ValueError)):
        return 400
    return 500
