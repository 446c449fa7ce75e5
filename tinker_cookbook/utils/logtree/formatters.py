"""Objects that render themselves in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tinker_cookbook.image_processing_utils import thumbnail_uri
from tinker_cookbook.utils.logtree.nodes import Node

CONVERSATION_CSS = """
.lt-message { border-left: 3px solid var(--line); padding: 0.1rem 0.75rem; margin: 0.5rem 0; }
.lt-message-assistant { border-color: var(--accent); background: var(--panel); }
.lt-role { color: var(--quiet); font-size: 0.8rem; font-weight: 600; }
.lt-thinking { color: var(--quiet); font-style: italic; }
"""


class Formatter(Protocol):
    """Argument of ``log_formatter``."""

    def to_html(self) -> str:
        """Returns the object as HTML with escaped text."""
        ...

    def get_css(self) -> str:
        """Returns the style sheet that this HTML needs."""
        ...


@dataclass(frozen=True)
class ConversationFormatter:
    """Shows the messages of a conversation.

    Attributes:
        messages: Messages as for a renderer: ``role``, ``content`` (text, or a list of parts), and
            optionally ``name`` and ``tool_calls``.
    """

    messages: Sequence[Mapping[str, Any]]

    def to_html(self) -> str:
        """Returns the messages in order."""
        return Node("div", {}, [_message(message) for message in self.messages]).to_html()

    def get_css(self) -> str:
        """Returns the style sheet of messages."""
        return CONVERSATION_CSS

    def to_data(self) -> dict[str, Any]:
        """Returns the conversation for JSON: ``type`` and ``messages``."""
        # Not at the top: reports without conversations do not need the renderers.
        from tinker_cookbook.renderers.core.messages import message_to_jsonable

        messages = [message_to_jsonable(cast(Any, message)) for message in self.messages]
        return {"type": "conversation", "messages": messages}


def _message(message: Mapping[str, Any]) -> Node:
    role = str(message.get("role", "?"))
    name = f"{role} ({message['name']})" if message.get("name") else role
    # A role from a data set may be any text, which must not become an HTML class.
    known = f" lt-message-{role}" if role.isidentifier() else ""
    node = Node("div", {"class": f"lt-message{known}"}, [Node("div", {"class": "lt-role"}, [name])])
    content = message.get("content") or ""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type")
        if kind in ("text", "thinking"):
            css = "lt-text" if kind == "text" else "lt-text lt-thinking"
            node.add(Node("div", {"class": css}, [str(part.get(kind, ""))]))
        elif kind == "image" and (small := thumbnail_uri(part.get("image"))):
            node.add(Node("img", {"src": small, "alt": ""}))
        else:
            node.add(Node("div", {"class": "lt-thinking"}, [f"[{kind}]"]))
    for call in message.get("tool_calls") or []:
        function = getattr(call, "function", None)
        # Calls in another form, such as dicts, are shown unchanged.
        text = str(call) if function is None else f"{function.name}({function.arguments})"
        node.add(Node("pre", {}, [text]))
    return node
