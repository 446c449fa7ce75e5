"""Objects that know how to show themselves in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tinker_cookbook.utils.logtree.nodes import Node

CONVERSATION_CSS = """
.lt-message { border-left: 3px solid var(--line); padding: 0.1rem 0.75rem; margin: 0.5rem 0; }
.lt-message-assistant { border-color: var(--accent); background: var(--answer-bg); }
.lt-role { color: var(--dim); font-size: 0.8rem; font-weight: 600; }
.lt-thinking { color: var(--dim); font-style: italic; }
"""


class Formatter(Protocol):
    """What ``log_formatter`` takes."""

    def to_html(self) -> str:
        """Returns the object as HTML, its text escaped."""
        ...

    def get_css(self) -> str:
        """Returns the style sheet that this HTML needs."""
        ...


@dataclass(frozen=True)
class ConversationFormatter:
    """Shows a conversation, message by message.

    Attributes:
        messages: As for a renderer: ``role``, ``content`` (text, or a list of parts), ``name`` and
            ``tool_calls`` where there are any.
    """

    messages: Sequence[Mapping[str, Any]]

    def to_html(self) -> str:
        """Returns the messages in their order."""
        return Node("div", {}, [_message(message) for message in self.messages]).to_html()

    def get_css(self) -> str:
        """Colours of roles."""
        return CONVERSATION_CSS

    def to_data(self) -> dict[str, Any]:
        """Returns the conversation for JSON: ``type`` and ``messages``."""
        # Not at the top: reports are written without renderers too.
        from tinker_cookbook.renderers.core.messages import message_to_jsonable

        messages = [message_to_jsonable(cast(Any, message)) for message in self.messages]
        return {"type": "conversation", "messages": messages}


def _message(message: Mapping[str, Any]) -> Node:
    role = str(message.get("role", "?"))
    name = f"{role} ({message['name']})" if message.get("name") else role
    known = f" lt-message-{role}" if role.isidentifier() else ""
    node = Node("div", {"class": f"lt-message{known}"}, [Node("div", {"class": "lt-role"}, [name])])
    content = message.get("content") or ""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        node.add(_part(part))
    for call in message.get("tool_calls") or []:
        node.add(Node("pre", {}, [_tool_call(call)]))
    return node


def _part(part: Mapping[str, Any]) -> Node:
    kind = part.get("type")
    if kind == "text":
        return Node("div", {"class": "lt-text"}, [str(part.get("text", ""))])
    if kind == "thinking":
        return Node("div", {"class": "lt-text lt-thinking"}, [str(part.get("thinking", ""))])
    return Node("div", {"class": "lt-thinking"}, [f"[{kind}]"])


def _tool_call(call: Any) -> str:
    function = getattr(call, "function", None)
    if function is None:
        return str(call)
    return f"{function.name}({function.arguments})"
