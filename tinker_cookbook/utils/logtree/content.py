"""Text, headings and folded blocks."""

from __future__ import annotations

from tinker_cookbook.utils.logtree.formatters import Formatter
from tinker_cookbook.utils.logtree.nodes import Node, Raw
from tinker_cookbook.utils.logtree.trace import append, open_place


def log_text(text: str, *, div_class: str | None = None) -> None:
    """A paragraph; line breaks and spaces are kept.

    Args:
        text: Plain text.
        div_class: CSS class of the element.
    """
    append(Node("p", {"class": f"lt-text {div_class or ''}".strip()}, [str(text)]))


def log_html(html: str, *, div_class: str | None = None) -> None:
    """HTML as it is, which must not come from outside: nothing in it is escaped.

    Args:
        html: Well-formed HTML.
        div_class: CSS class of the ``<div>`` around it.
    """
    append(Node("div", {"class": div_class} if div_class else {}, [Raw(html)]))


def log_formatter(formatter: Formatter) -> None:
    """What ``formatter`` makes of itself; its style sheet is taken once a page."""
    place = open_place()
    if place is not None:
        place.trace.add_css(formatter.get_css())
        place.container.add(Node("div", {}, [Raw(formatter.to_html())]))


def details(text: str, *, summary: str = "Details", pre: bool = True) -> None:
    """Text that unfolds at a click.

    Args:
        text: Plain text.
        summary: What is seen while it is folded.
        pre: In a typewriter face.
    """
    body = Node("pre" if pre else "div", {"class": "lt-body lt-text"}, [str(text)])
    append(Node("details", {"class": "lt-details"}, [Node("summary", {}, [summary]), body]))


def header(text: str, *, level: int | None = None) -> None:
    """A heading; by default one level below that of the scope around it.

    Args:
        text: Plain text.
        level: 1 to 6; what lies beyond becomes the nearest of these.
    """
    place = open_place()
    if place is not None:
        number = max(1, min(6, place.level + 1 if level is None else level))
        place.container.add(Node(f"h{number}", {}, [str(text)]))
