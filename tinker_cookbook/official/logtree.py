"""Functions of ``utils.logtree`` that only code of the official cookbook calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.utils.logtree.log import Scope, scope_header
from tinker_cookbook.utils.logtree.nodes import Node, escape, table_node
from tinker_cookbook.utils.logtree.trace import (
    OUTPUT,
    Output,
    Trace,
    append,
    current_output,
    page,
    write_file,
)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Theme:
    """Style of a page.

    Attributes:
        css_text: Style sheet that replaces the default one.
        css_urls: Style sheets that the page links to.
        css_vars: CSS custom properties of the page, such as ``{"--accent": "#c00"}``.
    """

    css_text: str | None = None
    css_urls: list[str] = field(default_factory=list)
    css_vars: dict[str, str] = field(default_factory=dict)


@overload
def scope_header_decorator(title: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@overload
def scope_header_decorator(title: Callable[P, R]) -> Callable[P, R]: ...


def scope_header_decorator(title: Any) -> Any:
    """Wraps a function in :func:`scope_header`; without a title, its name is the heading."""
    if isinstance(title, str):
        return scope_header(title)
    return scope_header(title.__name__)(title)


def scope_details(summary: str, *, open: bool = False) -> Scope:
    """Returns a block that shows only ``summary`` until a click, unless it is ``open``."""

    def enter(output: Output) -> Output:
        body = Node("div", {"class": "lt-body"})
        attrs = {"class": "lt-details", **({"open": ""} if open else {})}
        output.container.add(Node("details", attrs, [Node("summary", {}, [summary]), body]))
        return replace(output, container=body)

    return Scope(enter)


def details(text: str, *, summary: str = "Details", pre: bool = True) -> None:
    """Logs plain text that is hidden until a click; ``pre`` uses a monospaced font."""
    body = Node("pre" if pre else "div", {"class": "lt-body lt-text"}, [str(text)])
    append(Node("details", {"class": "lt-details"}, [Node("summary", {}, [summary]), body]))


def header(text: str, *, level: int | None = None) -> None:
    """Logs a heading of a ``level`` from 1 to 6, by default one below the heading of the scope."""
    output = current_output()
    if output is not None:
        number = max(1, min(6, output.level + 1 if level is None else level))
        output.container.add(Node(f"h{number}", {}, [str(text)]))


def table_from_dict(
    data: Mapping[Any, Any],
    *,
    caption: str | None = None,
    key_header: str = "key",
    value_header: str = "value",
    sort_by: str | None = None,
) -> None:
    """Logs a table with a column of keys and a column of values.

    ``sort_by`` is ``"key"``, ``"value"``, or ``None`` for the order of ``data``.
    """
    if sort_by not in ("key", "value", None):
        raise DataFormatError(f"sort_by={sort_by!r}; expected 'key', 'value' or None")
    if current_output() is None:
        return
    items = list(data.items())
    if sort_by is not None:
        # False is index 0 of an item, the key; True is 1, the value.
        items.sort(key=lambda item: item[sort_by == "value"])
    append(table_node(items, [key_header, value_header], caption))


def table_from_dict_of_lists(
    columns: Mapping[str, Sequence[Any]],
    *,
    caption: str | None = None,
    order: Sequence[str] | None = None,
) -> None:
    """Logs a table of columns of equal length; ``order`` selects and orders the columns.

    Raises ``DataFormatError`` if the lengths differ or a name in ``order`` is unknown.
    """
    if current_output() is None:
        return
    names = list(columns) if order is None else list(order)
    missing = [name for name in names if name not in columns]
    lengths = {name: len(values) for name, values in columns.items()}
    if missing or len(set(lengths.values())) > 1:
        problem = f"no column {missing[0]!r}" if missing else "expected columns of one length"
        raise DataFormatError(f"table_from_dict_of_lists: {problem}; got {lengths}")
    rows = zip(*(columns[name] for name in names), strict=True)
    append(table_node([list(row) for row in rows], names, caption))


def flush_trace() -> bool:
    """Writes the open report in its current state; returns False if there is no file to write."""
    # Not current_output: a report can be written where logging is disabled.
    output = OUTPUT.get()
    return output is not None and output.trace.write()


def write_html_with_default_style(
    body_html: str,
    path: str | os.PathLike[str],
    *,
    title: str = "Trace",
    theme: Theme | None = None,
    lang: str = "en",
    extra_head: str | None = None,
) -> None:
    """Writes a page around ``body_html``, which may have its ``<body>`` tag; nothing is escaped.

    ``theme`` replaces the style of reports; ``extra_head`` is HTML at the end of the head.
    """
    theme = theme or Theme()
    properties = "".join(f"{name}: {value};" for name, value in theme.css_vars.items())
    more = [f":root {{{properties}}}"] if properties else []
    head = page().head_html(title, *more, base=theme.css_text)
    head += "".join(f'<link rel="stylesheet" href="{escape(url)}">\n' for url in theme.css_urls)
    body = body_html if "<body" in body_html else f"<body>\n{body_html}\n</body>\n"
    html = page().document(head + (extra_head or ""), body, lang)
    write_file(Path(path), html.encode("utf-8", "replace"))


def jinja_context(trace: Trace, **extra: Any) -> dict[str, Any]:
    """Returns template variables of a report: ``title``, ``generated_at``, ``started_at``,
    ``body_html``, ``head_html`` and ``extra``."""
    return {
        "title": trace.title,
        "generated_at": datetime.now().astimezone().isoformat(),
        "started_at": trace.started_at.isoformat(),
        "body_html": trace.body_html(),
        "head_html": trace.head_html(),
        **extra,
    }


def render_with_jinja(
    env: Any,
    template_name: str,
    *,
    context: Mapping[str, Any],
    write_to: str | os.PathLike[str] | None = None,
) -> str:
    """Renders a template of a ``jinja2.Environment``, and writes it to ``write_to`` if given."""
    page: str = env.get_template(template_name).render(**context)
    if write_to is not None:
        write_file(Path(write_to), page.encode("utf-8", "replace"))
    return page
