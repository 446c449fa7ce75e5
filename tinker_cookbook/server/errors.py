"""Errors of requests, and the statuses they get.

The SDK repeats 408, 409, 429 and all from 500 for minutes, so what cannot get better has another.
"""

from __future__ import annotations

from tinker_cookbook.exceptions import BackendError, CheckpointError, TinkerCookbookError


class NotThere(BackendError):  # noqa: N818
    """Nothing of that id that this owner may see: 404."""


class Gone(NotThere):
    """A session or request that was there before: 404 too, since 410 asks for a repetition."""


class Busy(BackendError):  # noqa: N818
    """Too much is waiting: 429, the protocol's "try again"."""


class TooLarge(BackendError):  # noqa: N818
    """A body above the limit: 413."""


def status_of(error: Exception) -> int:
    """The HTTP status of an error that is said at once."""
    if isinstance(error, (NotThere, CheckpointError)):
        return 404
    if isinstance(error, Busy):
        return 429
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, (TinkerCookbookError, ValueError)):
        return 400
    return 500
