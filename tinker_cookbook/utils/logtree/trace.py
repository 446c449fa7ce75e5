"""Reports, their pages and files, and the position where the running code writes."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.run.jsonl import encode_row
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.utils.logtree.nodes import Child, Node

logger = logging.getLogger(__name__)


class Trace:
    """A report.

    Attributes:
        title: Title of the page.
        path: File of the HTML; ``None`` keeps it in memory.
        write_on_error: Whether :func:`init_trace` writes the report if its block raises.
        root: Body of the page.
    """

    def __init__(
        self, title: str, path: str | os.PathLike[str] | None = None, write_on_error: bool = True
    ) -> None:
        self.title = title
        self.write_on_error = write_on_error
        self.path = None if path is None else Path(path)
        self.started_at = datetime.now().astimezone()
        self.root = Node("body")
        self.css: list[str] = []  # style sheets in addition to the default one

    def add_css(self, css: str) -> None:
        """Adds a style sheet, if the report does not have it yet."""
        if css and css not in self.css:
            self.css.append(css)

    def head_html(self) -> str:
        """Returns the content of ``<head>``."""
        return page().head_html(self.title, *self.css)

    def body_html(self, wrap_body: bool = True) -> str:
        """Returns the body of the page, with or without its ``<body>`` tag."""
        whole = self.root.to_html()
        if wrap_body:
            return whole
        return whole[whole.index(">") + 1 : whole.rindex("</body>")].strip("\n")

    get_html = body_html
    """Name of ``body_html`` in the official cookbook."""

    def html(self) -> str:
        """Returns the whole page; it refers to no other file."""
        return page().document(self.head_html(), self.body_html())

    def to_json(self) -> dict[str, Any]:
        """Returns ``{"title", "started_at", "path", "root": {"tag", "attrs", "children",
        "data"?}}``."""
        return {
            "title": self.title,
            "started_at": self.started_at.isoformat(timespec="seconds"),
            "path": None if self.path is None else str(self.path),
            "root": self.root.to_json(),
        }

    to_dict = to_json
    """Name of ``to_json`` in the official cookbook."""

    def write(self) -> bool:
        """Writes the HTML, whole or not at all; returns False if there is no ``path``."""
        if self.path is None:
            return False
        # Sampled text may have lone surrogates, which UTF-8 cannot encode.
        write_file(self.path, self.html().encode("utf-8", "replace"))
        return True


@dataclass(frozen=True)
class Output:
    """Where the running code writes: the innermost element, and the level of its heading."""

    trace: Trace
    container: Node
    level: int
    enabled: bool = True


OUTPUT: ContextVar[Output | None] = ContextVar("logtree_output", default=None)


def current_output() -> Output | None:
    """Returns where to write; ``None`` if no report is open or logging is disabled."""
    output = OUTPUT.get()
    return output if output is not None and output.enabled else None


def append(*children: Child) -> None:
    """Writes to the open report, if there is one."""
    output = current_output()
    if output is not None:
        output.container.add(*children)


@contextmanager
def init_trace(
    title: str, path: str | os.PathLike[str] | None = None, *, write_on_error: bool = True
) -> Iterator[Trace]:
    """Opens a report, and writes it to ``path``, if given, at the end of the block.

    An exception in the block (Ctrl-C too) is added with its traceback; ``write_on_error`` writes
    the report in this case too. Raises ``TrainingError`` if the file cannot be written.
    """
    trace = Trace(title, path, write_on_error)
    started = trace.started_at.isoformat(sep=" ", timespec="seconds")
    trace.root.add(Node("h1", {}, [title]), Node("p", {"class": "lt-meta"}, [started]))
    token = OUTPUT.set(Output(trace, trace.root, level=1))
    try:
        yield trace
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        summary = Node("summary", {}, [f"{type(error).__name__}: {error}"])
        block = Node("details", {"class": "lt-error", "open": ""}, [summary])
        trace.root.add(block.add(Node("pre", {}, [text])))
        if write_on_error:
            # The caller must see the error of the block, not the error of writing.
            try:
                trace.write()
            except TrainingError as second:
                logger.warning("while handling %r: %s", error, second)
        raise
    else:
        trace.write()
    finally:
        OUTPUT.reset(token)


def write_trace_json(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the report as JSON, whole or not at all. NaN becomes null, as in ``metrics.jsonl``.

    Raises ``DataFormatError`` if the ``data`` of a node has no JSON form.
    """
    # encode_row is used for its strict JSON: readers of the file fail on NaN.
    write_file(Path(path), encode_row(trace.to_json()))


def page() -> Any:
    """Returns the module with the page of the viewer, whose style reports have too."""
    return load_leaf("view.page", "an HTML report (path=….html)")


def write_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, and creates its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror or error}; free some space there or make "
            f"the folder writable"
        ) from error
