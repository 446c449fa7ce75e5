"""The open report and where in it the running code stands."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.utils.logtree.nodes import Child, Node, escape
from tinker_cookbook.utils.logtree.style import CSS
from tinker_cookbook.utils.run_folder.jsonl import encode_row
from tinker_cookbook.utils.run_folder.paths import write_atomically

logger = logging.getLogger(__name__)


class Trace:
    """A report.

    Attributes:
        title: Of the page.
        path: Where the HTML goes; ``None`` keeps it in memory.
        write_on_error: Whether :func:`init_trace` also writes it where its block raises.
        started_at: When it was opened.
        root: The page's body.
    """

    def __init__(
        self,
        title: str,
        path: str | os.PathLike[str] | None = None,
        write_on_error: bool = True,
    ) -> None:
        self.title = title
        self.write_on_error = write_on_error
        self.path = None if path is None else Path(path)
        self.started_at = datetime.now().astimezone()
        self.root = Node("body")
        self._css: dict[str, None] = {}

    def add_css(self, css: str) -> None:
        """Adds a style sheet, once however often it is given."""
        if css:
            self._css[css] = None

    @property
    def css(self) -> list[str]:
        """The style sheets that were added."""
        return list(self._css)

    def head_html(self) -> str:
        """Returns what stands between ``<head>`` and ``</head>`` of the page."""
        return head_html(self.title, self.css)

    def body_html(self, wrap_body: bool = True) -> str:
        """Returns the body of the page, with or without its ``<body>`` tag."""
        whole = self.root.to_html()
        if wrap_body:
            return whole
        return whole[whole.index(">") + 1 : whole.rindex("</body>")].strip("\n")

    def html(self) -> str:
        """Returns the whole page; it refers to no other file."""
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n{self.head_html()}</head>\n'
            f"{self.body_html()}</html>\n"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns ``{"title", "started_at", "path", "root": {"tag", "attrs", "children",
        "data"?}}``."""
        return {
            "title": self.title,
            "started_at": self.started_at.isoformat(timespec="seconds"),
            "path": None if self.path is None else str(self.path),
            "root": self.root.to_json(),
        }

    def write(self) -> bool:
        """Writes the HTML, whole or not at all; returns whether there is a path to write to.

        Raises:
            TrainingError: It cannot be written.
        """
        if self.path is None:
            return False
        write_file(self.path, self.html().encode("utf-8", "replace"))
        return True


@dataclass(frozen=True)
class Place:
    """Where output of the running code goes: the innermost element, and its level of headings."""

    trace: Trace
    container: Node
    level: int
    enabled: bool = True


PLACE: ContextVar[Place | None] = ContextVar("logtree_place", default=None)


def open_place() -> Place | None:
    """Returns where to write; ``None`` where no report is open or output is switched off."""
    place = PLACE.get()
    return place if place is not None and place.enabled else None


def append(*children: Child) -> None:
    """Writes to the open report, if there is one."""
    place = open_place()
    if place is not None:
        place.container.add(*children)


@contextmanager
def init_trace(
    title: str, path: str | os.PathLike[str] | None = None, *, write_on_error: bool = True
) -> Iterator[Trace]:
    """Opens a report; at the end writes it.

    Args:
        title: Of the page, and its first heading.
        path: Where the HTML goes; its folder is made. ``None`` writes nothing.
        write_on_error: Write also where an exception (Ctrl-C too) ends the block, with what it
            was.

    Raises:
        TrainingError: The file cannot be written.
    """
    trace = Trace(title, path, write_on_error)
    started = trace.started_at.isoformat(sep=" ", timespec="seconds")
    trace.root.add(Node("h1", {}, [title]), Node("p", {"class": "lt-meta"}, [started]))
    token = PLACE.set(Place(trace, trace.root, level=1))
    try:
        yield trace
    except BaseException as error:
        trace.root.add(_error_node(error))
        if write_on_error:
            _write_beside(trace, error)
        raise
    else:
        trace.write()
    finally:
        PLACE.reset(token)


def head_html(title: str, css: Sequence[str], base: str | None = None) -> str:
    """Meta tags, title and style of a page; ``base`` takes the place of the default style."""
    # "</style" would end the element early, and what follows would be shown.
    style = "\n".join([CSS if base is None else base, *css]).replace("</", "<\\/")
    return (
        '<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n"
    )


def flush_trace() -> bool:
    """Writes the open report as it is now; returns whether there was anything to write to.

    Raises:
        TrainingError: The file cannot be written.
    """
    place = PLACE.get()
    return place is not None and place.trace.write()


def write_trace_json(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the report as JSON, whole or not at all. NaN becomes null, as in ``metrics.jsonl``.

    Raises:
        TrainingError: The file cannot be written.
        DataFormatError: The ``data`` of a node has no JSON form.
    """
    write_file(Path(path), encode_row(trace.to_json()))


def write_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; makes its folder.

    Raises:
        TrainingError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror or error}; free some space there or make "
            f"the folder writable"
        ) from error


def _write_beside(trace: Trace, error: BaseException) -> None:
    """Writes while ``error`` is on its way: that one is what the caller must see."""
    try:
        trace.write()
    except TrainingError as second:
        logger.warning("while handling %r: %s", error, second)


def _error_node(error: BaseException) -> Node:
    text = "".join(traceback.format_exception(error))
    summary = Node("summary", {}, [f"{type(error).__name__}: {error}"])
    return Node("details", {"class": "lt-error", "open": ""}, [summary, Node("pre", {}, [text])])
