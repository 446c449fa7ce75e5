"""Guards for files of other programs and damaged ones, which can have any content."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from tinker_cookbook.exceptions import TinkerCookbookError

_T = TypeVar("_T")


class NotFoundError(Exception):
    """A folder has no run or evaluation of a name."""


def as_json(content: Any) -> str:
    """Returns JSON in ASCII, also of lone surrogates; NaN and infinity are texts."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return as_json(json.loads(json.dumps(content), parse_constant=str))


def reason(error: Exception) -> str:
    """Returns why something cannot be read."""
    if isinstance(error, TinkerCookbookError):
        return str(error)
    return f"cannot be read: {type(error).__name__}: {error}"


def attempt(part: str, read: Callable[[], _T], otherwise: _T, problems: list[str]) -> _T:
    """Returns what ``read`` returns; if it fails ``otherwise``, and adds why to ``problems``."""
    try:
        return read()
    except Exception as error:  # one part must not hide the others
        problems.append(f"{part}: {reason(error)}")
        return otherwise
