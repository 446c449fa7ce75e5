"""Elements of a report, in HTML and in JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import markupsafe

from tinker_cookbook.run.loggers import format_value

# A line break after these keeps the source readable. After a <span> it would be a space.
_BLOCKS = frozenset(
    {"section", "div", "p", "pre", "table", "caption", "thead", "tbody", "tr", "details"}
    | {"summary", "h1", "h2", "h3", "h4", "h5", "h6"}
)

# A browser drops NUL and turns a carriage return into a line break; sampled text may hold any.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS[127] = "\u2421"

Raw = markupsafe.Markup
"""HTML that is not escaped."""

Child: TypeAlias = "Node | Raw | str"


@dataclass
class Node:
    """An HTML element.

    Attributes:
        tag: Name of the element.
        attrs: HTML attributes.
        children: Elements, raw HTML, or text, which is escaped in HTML.
        data: Values for programs; they are in the JSON form only.
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
        """Returns the element and its content as HTML."""
        attrs = "".join(f' {name}="{escape(value)}"' for name, value in self.attrs.items())
        start = f"<{self.tag}{attrs}>"
        # HTML defines these without content and closing tag.
        if self.tag in ("br", "hr", "img"):
            return start
        if self.tag == "pre":
            start += "\n"  # a parser drops the first line break of a <pre>
        # Copied first: another task may be writing into this node.
        content = "".join([escape(child) for child in list(self.children)])
        return f"{start}{content}</{self.tag}>" + ("\n" if self.tag in _BLOCKS else "")

    __html__ = to_html  # makes ``escape`` and templates insert a node as HTML

    def to_json(self) -> dict[str, Any]:
        """Returns ``{"tag", "attrs", "children", "data"?}``; raw HTML is a node ``#html``."""
        # Copied, as in to_html: another task may be writing into this node.
        children: list[Any] = []
        for child in list(self.children):
            if isinstance(child, Node):
                children.append(child.to_json())
            elif isinstance(child, Raw):
                children.append({"tag": "#html", "attrs": {}, "children": [str(child)]})
            else:
                children.append(child)
        out: dict[str, Any] = {"tag": self.tag, "attrs": dict(self.attrs), "children": children}
        return out if self.data is None else {**out, "data": self.data}

    to_dict = to_json
    """Name of ``to_json`` in the official cookbook."""


def visible(text: str) -> str:
    """Replaces control characters by their pictures, which could control a terminal or a page."""
    return text.translate(_CONTROLS)


def escape(value: Any) -> Raw:
    """Returns a node, raw HTML, or text as HTML; control characters of text become visible."""
    return markupsafe.escape(value if hasattr(value, "__html__") else visible(str(value)))


def attributes(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns keyword arguments as HTML attributes: ``class_`` is ``class``, ``data__id``
    ``data-id``."""
    # Python names cannot contain a dash or be a keyword such as class.
    return {re.sub("_+", "-", key.rstrip("_")): str(value) for key, value in values.items()}


def table_node(
    rows: Sequence[Sequence[Any]], columns: Sequence[str] | None, caption: str | None = None
) -> Node:
    """Returns a table. Cells are nodes or values; numbers are aligned to the right."""
    node = Node("table")
    if caption:
        node.add(Node("caption", {}, [caption]))
    if columns is not None:
        heads = [Node("th", {}, [name]) for name in columns]
        node.add(Node("thead", {}, [Node("tr", {}, [*heads])]))
    body = Node("tbody")
    for row in rows:
        line = Node("tr")
        for value in row:
            if _is_number(value):
                line.add(Node("td", {"class": "lt-num"}, [format_value(value)]))
            else:
                text = "" if value is None else str(value)
                line.add(Node("td", {}, [value if isinstance(value, Node) else text]))
        body.add(line)
    return Node("div", {"class": "lt-table-box"}, [node.add(body)])


def _is_number(value: Any) -> bool:
    scalar_array = hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0  # numpy, torch
    # True and False are words, not quantities.
    return scalar_array or (isinstance(value, (int, float)) and not isinstance(value, bool))
