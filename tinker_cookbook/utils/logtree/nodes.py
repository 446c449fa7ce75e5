"""Elements of a report, and how they become HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError

# A line break behind these keeps the source readable. Behind a <span> it would be a space.
_BLOCKS = frozenset(
    {"section", "div", "p", "pre", "table", "caption", "thead", "tbody", "tr", "details"}
    | {"summary", "h1", "h2", "h3", "h4", "h5", "h6"}
)
_VOID = frozenset({"br", "hr", "img"})
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")

# A browser drops NUL and turns a carriage return into a line break; sampled text may hold any.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS[127] = "\u2421"


@dataclass(frozen=True)
class Raw:
    """HTML to be taken as it is."""

    html: str


Child: TypeAlias = "Node | Raw | str"


@dataclass
class Node:
    """An HTML element; children that are strings are text and escaped when rendered.

    ``data`` is for machines: it stands in the JSON form of a report and not in the HTML.
    """

    tag: str
    attrs: dict[str, str] = field(default_factory=dict)
    children: list[Child] = field(default_factory=list)
    data: dict[str, Any] | None = None

    def add(self, *children: Child) -> Node:
        """Appends children; returns this node."""
        self.children.extend(children)
        return self

    def to_html(self) -> str:
        """Returns the element with all that is in it."""
        pieces: list[str] = []
        _render(self, pieces)
        return "".join(pieces)

    def to_json(self) -> dict[str, Any]:
        """Returns ``{"tag", "attrs", "children", "data"?}``; raw HTML is a node ``#html``."""
        # Copied first: another task may be writing into this node.
        children = [_child_json(child) for child in list(self.children)]
        out: dict[str, Any] = {"tag": self.tag, "attrs": dict(self.attrs), "children": children}
        if self.data is not None:
            out["data"] = self.data
        return out

    def text(self) -> str:
        """Returns all text in it, without markup; raw HTML is left out."""
        return "".join(
            child if isinstance(child, str) else child.text() if isinstance(child, Node) else ""
            for child in list(self.children)
        )


def visible(text: str) -> str:
    """Control characters as their pictures: sampled text must not steer a terminal or a page."""
    return text.translate(_CONTROLS)


def escape(text: str) -> str:
    """Text as HTML, with control characters made visible."""
    return html.escape(visible(text))


def attributes(values: Mapping[str, Any]) -> dict[str, str]:
    """Keyword arguments as attributes: ``class_`` is ``class``, ``data__id`` is ``data-id``.

    Raises:
        ConfigurationError: A name is none that HTML knows.
    """
    out: dict[str, str] = {}
    for key, value in values.items():
        name = re.sub("_+", "-", key.rstrip("_"))
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"HTML attribute {key!r}: expected letters, digits and underscores, such as class_ "
                f"or data__id"
            )
        out[name] = str(value)
    return out


def _render(node: Node, pieces: list[str]) -> None:
    attrs = "".join(f' {name}="{escape(value)}"' for name, value in node.attrs.items())
    pieces.append(f"<{node.tag}{attrs}>")
    if node.tag in _VOID:
        return
    if node.tag == "pre":
        pieces.append("\n")  # a parser drops the first line break of a <pre>
    for child in list(node.children):
        if isinstance(child, Node):
            _render(child, pieces)
        else:
            pieces.append(child.html if isinstance(child, Raw) else escape(child))
    pieces.append(f"</{node.tag}>")
    if node.tag in _BLOCKS:
        pieces.append("\n")


def _child_json(child: Child) -> Any:
    if isinstance(child, str):
        return child
    if isinstance(child, Raw):
        return {"tag": "#html", "attrs": {}, "children": [child.html]}
    return child.to_json()
