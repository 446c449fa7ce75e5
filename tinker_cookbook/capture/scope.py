"""Key-value pairs that name what a call belongs to: its run, iteration, group and trajectory.

``with capture(run_id="my-run", iteration=3)`` sets pairs for all code in the block. Each asyncio
task and each thread has its own; :mod:`tinker_cookbook.capture.propagate` takes them into threads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

ScopeValue = str | int | float | bool | None
"""A value of a scope."""

RESERVED_KEYS: frozenset[str] = frozenset(
    {"run_id", "run_attempt", "split", "iteration", "group_idx", "traj_idx", "purpose"}
)
"""Keys that have a column of their own in the store; any other key is allowed too."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The merged pairs of each open block, outermost first. A tuple needs no reset tokens, which are
# bound to one context: the same ``capture`` object may be entered by several tasks and threads.
_open: ContextVar[tuple[Mapping[str, ScopeValue], ...]] = ContextVar("capture_scope", default=())
_NO_PAIRS: Mapping[str, ScopeValue] = MappingProxyType({})


def current_scope() -> Mapping[str, ScopeValue]:
    """Returns the pairs of the innermost block, read-only; empty outside of any."""
    stack = _open.get()
    return stack[-1] if stack else _NO_PAIRS


class capture:  # noqa: N801 (a public name of the official cookbook)
    """Adds pairs to the scope of a block, or of a function that it decorates (``async`` too).

    Pairs of an inner block replace those of the same name. At the end of the block the scope is as
    before.

    Args:
        **pairs: Strings, numbers, booleans or ``None``.

    Raises:
        TypeError: A value is of another type.
    """

    def __init__(self, /, **pairs: ScopeValue) -> None:
        self._pairs = _checked(pairs)

    def __enter__(self) -> Mapping[str, ScopeValue]:
        return _push({**current_scope(), **self._pairs})

    def __exit__(self, *exc: object) -> None:
        _open.set(_open.get()[:-1])

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        """Returns ``func``, whose calls run in the scope."""
        # A plain wrapper would leave the block when the coroutine is created, before it runs.
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def scoped_async(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                with self:
                    return await func(*args, **kwargs)

            return cast(Callable[_P, _R], scoped_async)

        @functools.wraps(func)
        def scoped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return func(*args, **kwargs)

        return scoped


@contextmanager
def replace_scope(pairs: Mapping[str, ScopeValue]) -> Iterator[Mapping[str, ScopeValue]]:
    """Makes ``pairs`` the whole scope of the block; those outside of it are not merged.

    A worker thread or process continues with the scope of the code that gave it the task.
    """
    scope = _push(_checked(dict(pairs)))
    try:
        yield scope
    finally:
        _open.set(_open.get()[:-1])


def _push(pairs: dict[str, ScopeValue]) -> Mapping[str, ScopeValue]:
    scope = MappingProxyType(pairs)
    _open.set((*_open.get(), scope))
    return scope


def _checked(pairs: dict[str, ScopeValue]) -> dict[str, ScopeValue]:
    for key, value in pairs.items():
        if not isinstance(value, ScopeValue):
            raise TypeError(
                f"capture: {key!r} is of type {type(value).__name__}, expected a scalar (str, int, "
                "float, bool or None); give its text or its number"
            )
    return pairs
