"""Scopes: what is logged inside of them stands inside an element."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import Token
from dataclasses import replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.logtree.nodes import Node, attributes
from tinker_cookbook.utils.logtree.trace import PLACE, Place

P = ParamSpec("P")
R = TypeVar("R")
_DEEPEST = 6


class Scope:
    """A scope for ``with``, and a decorator of functions and coroutine functions.

    ``contextlib``'s decorator would close the scope before a coroutine has run at all.
    """

    def __init__(self, enter: Callable[[Place], Place]) -> None:
        self._enter = enter
        self._tokens: list[Token[Place | None] | None] = []

    def __enter__(self) -> None:
        place = PLACE.get()
        if place is None or not place.enabled:
            self._tokens.append(None)
        else:
            self._tokens.append(PLACE.set(self._enter(place)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        token = self._tokens.pop()
        if token is not None:
            PLACE.reset(token)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wraps ``function`` so that each call has a scope of its own.

        Raises:
            ConfigurationError: It is a generator, which runs in the context of whoever asks it for
                the next value.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"{function.__name__} is a generator and cannot be wrapped in a scope; open the "
                f"scope with a with-statement around the code that logs"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with Scope(self._enter):
                    return await function(*args, **kwargs)

            return run_async  # pyright: ignore[reportReturnType]

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with Scope(self._enter):
                return function(*args, **kwargs)

        return run


def scope_header(title: str, **attrs: Any) -> Scope:
    """Returns a section with a heading, one level below that of the scope around it.

    Args:
        title: The heading.
        **attrs: Attributes of the section: ``class_="x"``, ``data__id="3"``.
    """
    given = attributes(attrs)

    def enter(place: Place) -> Place:
        level = min(place.level + 1, _DEEPEST)
        classes = " ".join(["lt-section", *given.get("class", "").split()])
        section = Node("section", {**given, "class": classes}, [Node(f"h{level}", {}, [title])])
        place.container.add(section)
        return replace(place, container=section, level=level)

    return Scope(enter)


@overload
def scope_header_decorator(title: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@overload
def scope_header_decorator(title: Callable[P, R]) -> Callable[P, R]: ...


def scope_header_decorator(title: Any) -> Any:
    """Wraps a function in :func:`scope_header`; bare, the heading is the function's name."""
    if isinstance(title, str):
        return scope_header(title)
    return scope_header(title.__name__)(title)


def scope_div(**attrs: Any) -> Scope:
    """Returns a ``<div>``; headings inside keep their level."""
    given = attributes(attrs)

    def enter(place: Place) -> Place:
        div = Node("div", dict(given))
        place.container.add(div)
        return replace(place, container=div)

    return Scope(enter)


def scope_details(summary: str, *, open: bool = False) -> Scope:
    """Returns a block that unfolds at a click.

    Args:
        summary: What is seen while it is folded.
        open: Whether it starts unfolded.
    """

    def enter(place: Place) -> Place:
        body = Node("div", {"class": "lt-body"})
        attrs = {"class": "lt-details", **({"open": ""} if open else {})}
        place.container.add(Node("details", attrs, [Node("summary", {}, [summary]), body]))
        return replace(place, container=body)

    return Scope(enter)


def scope_disable() -> Scope:
    """Nothing is logged inside."""
    return Scope(lambda place: replace(place, enabled=False))


def optional_enable_logging(enable: bool) -> Scope:
    """:func:`scope_disable` unless ``enable``."""
    return Scope(lambda place: replace(place, enabled=enable))
