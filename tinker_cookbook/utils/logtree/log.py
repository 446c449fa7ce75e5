"""Functions that write to the open report: scopes, text, and tables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from contextvars import Token
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.utils.logtree.formatters import Formatter
from tinker_cookbook.utils.logtree.nodes import Node, Raw, attributes, table_node
from tinker_cookbook.utils.logtree.trace import OUTPUT, Output, append, current_output

P = ParamSpec("P")
R = TypeVar("R")


class Scope(ContextDecorator):
    """A context manager, and a decorator of functions and coroutine functions.

    The decorator of ``contextlib`` alone would close the scope before a coroutine has run at all.
    """

    def __init__(self, enter: Callable[[Output], Output]) -> None:
        self._enter = enter
        self._tokens: list[Token[Output | None] | None] = []

    def __enter__(self) -> None:
        output = current_output()
        # A list, since one scope object may be entered several times, nested or in turn.
        self._tokens.append(None if output is None else OUTPUT.set(self._enter(output)))

    def __exit__(self, *error: object) -> None:
        token = self._tokens.pop()
        if token is not None:
            OUTPUT.reset(token)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wraps ``function`` so that each call opens a new scope; a generator cannot be wrapped."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"{function.__name__} is a generator and cannot be wrapped in a scope; open the "
                f"scope with a with-statement around the code that logs"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                # A new scope for each call: concurrent calls would share one list of tokens.
                with Scope(self._enter):
                    return await function(*args, **kwargs)

            return run_async  # pyright: ignore[reportReturnType]

        return super().__call__(function)

    def _recreate_cm(self) -> Scope:
        return Scope(self._enter)


def scope_header(title: str, **attrs: Any) -> Scope:
    """Returns a section with a heading, one level below the heading of the outer scope.

    ``attrs`` are HTML attributes of the section: ``class_="x"``, ``data__id="3"``.
    """
    # Converted once and not at each entry, so that a wrong name raises where it is written.
    given = attributes(attrs)

    def enter(output: Output) -> Output:
        # HTML has headings up to h6.
        level = min(output.level + 1, 6)
        classes = " ".join(["lt-section", *given.get("class", "").split()])
        section = Node("section", {**given, "class": classes}, [Node(f"h{level}", {}, [title])])
        output.container.add(section)
        return replace(output, container=section, level=level)

    return Scope(enter)


def scope_div(**attrs: Any) -> Scope:
    """Returns a ``<div>`` that does not change the level of headings inside it."""
    given = attributes(attrs)

    def enter(output: Output) -> Output:
        div = Node("div", dict(given))
        output.container.add(div)
        return replace(output, container=div)

    return Scope(enter)


def scope_disable() -> Scope:
    """Returns a scope in which nothing is logged."""
    return optional_enable_logging(False)


def optional_enable_logging(enable: bool) -> Scope:
    """Returns a scope in which nothing is logged unless ``enable``."""
    return Scope(lambda output: replace(output, enabled=enable))


def log_text(text: str, *, div_class: str | None = None) -> None:
    """Logs a paragraph of plain text; line breaks and spaces are kept."""
    append(Node("p", {"class": f"lt-text {div_class or ''}".strip()}, [str(text)]))


def log_html(html: str, *, div_class: str | None = None) -> None:
    """Logs HTML in a ``<div>`` without escaping it; it must not come from an untrusted source."""
    append(Node("div", {"class": div_class} if div_class else {}, [Raw(html)]))


def log_formatter(formatter: Formatter) -> None:
    """Logs the HTML of a formatter, and adds its style sheet once per page."""
    output = current_output()
    if output is not None:
        output.trace.add_css(formatter.get_css())
        # Optional in the protocol: what programs read in the JSON report.
        to_data: Callable[[], dict[str, Any] | None] | None = getattr(formatter, "to_data", None)
        data = None if to_data is None else to_data()
        output.container.add(Node("div", {}, [Raw(formatter.to_html())], data))


def table(obj: Any, *, caption: str | None = None) -> None:
    """Logs a pandas ``DataFrame``, a list of dicts, or a list of rows as a table.

    The columns of dicts are all their keys, in the order of first occurrence. Raises
    ``DataFormatError`` for other objects.
    """
    # Nothing is built if logging is off: rows may be expensive to convert.
    if current_output() is None:
        return
    # By attributes, so that pandas is not imported.
    if hasattr(obj, "columns") and hasattr(obj, "itertuples"):
        rows = [list(row) for row in obj.itertuples(index=False, name=None)]
        append(table_node(rows, [str(name) for name in obj.columns], caption))
    elif not _is_list(obj):
        is_dict = isinstance(obj, Mapping)
        hint = "; use table_from_dict or table_from_dict_of_lists" if is_dict else ""
        raise DataFormatError(
            f"table: got {type(obj).__name__}, expected a DataFrame, a list of dicts, or a list of "
            f"lists{hint}"
        )
    elif all(isinstance(row, Mapping) for row in obj):
        columns = list(dict.fromkeys(key for row in obj for key in row))
        rows = [[row.get(key, "") for key in columns] for row in obj]
        append(table_node(rows, [str(key) for key in columns], caption))
    else:
        append(table_node(obj, None, caption))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
