"""Checks of messages: known roles, and content that a chat format can express.

Training on a conversation without its tool calls would not train on the given data, so a
chat format refuses what it cannot write instead of dropping it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError, nearest
from tinker_cookbook.model_info import other_renderer
from tinker_cookbook.renderers.core.messages import Message, get_text_content

ROLES = ("system", "user", "assistant", "tool", "developer")
# Types of content parts.
TEXT = frozenset({"text"})
TEXT_AND_THINKING = frozenset({"text", "thinking"})
TEXT_AND_IMAGES = frozenset({"text", "image"})

_CURES = {
    "thinking": "drop it with remove_thinking(content)",
    "image": "images belong to messages of users and tools",
}

_ROLE_ALIASES = {
    **dict.fromkeys(("human", "prompter", "instruction"), "user"),
    **dict.fromkeys(("gpt", "bot", "ai", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation"), "tool"),
}


def check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises RendererError for a role that no chat format has; most would render it unchanged."""
    # Roles of single formats: declarations of tools (Kimi K2, Mistral), tool results (Llama 3).
    known = {*ROLES, "tool_declare", "available_tools", "ipython"}
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in known:
            meant = _ROLE_ALIASES.get(str(role).lower())
            hint = f"; did you mean {meant!r}?" if meant else nearest(str(role), ROLES)
            raise RendererError(
                f"messages[{i}].role: got {role!r}, expected one of {', '.join(ROLES)}{hint}"
            )


def check_parts(
    message: Message, idx: int, renderer: str, allowed: frozenset[str], model: str | None = None
) -> None:
    """Raises RendererError for a part that the chat format cannot write.

    ``model`` is the model's name, with which the error says what takes images.
    """
    content = message["content"]
    for part in () if isinstance(content, str) else content:
        if part["type"] not in allowed:
            cure = _CURES.get(part["type"], "use the renderer of a model that takes it")
            if part["type"] == "image" and message["role"] in ("user", "tool"):
                name = renderer.partition("?")[0]
                cure = f"renderer_name: got {name!r}, {other_renderer(model, name, images=True)}"
            raise RendererError(
                f"messages[{idx}].content: {renderer} cannot write a part of type "
                f"{part['type']!r}, expected {' or '.join(sorted(allowed))}; {cure}"
            )


def check_caller(message: Message, idx: int) -> None:
    """Raises RendererError for tool calls by another role than the assistant's."""
    role = message["role"]
    if role != "assistant" and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
        raise RendererError(
            f"messages[{idx}].tool_calls: got tool calls by role {role!r}, expected them "
            "in messages of role 'assistant' only"
        )


def text_of(message: Message, idx: int, renderer: str, model: str | None = None) -> str:
    """Returns the text of a message; raises RendererError if it has anything else."""
    check_parts(message, idx, renderer, TEXT, model)
    for field in ("tool_calls", "unparsed_tool_calls"):
        if message.get(field):
            raise RendererError(
                f"messages[{idx}].{field}: {renderer} has no form for tool calls, expected a "
                "message without; use a renderer with tools, such as qwen3 or llama3"
            )
    return get_text_content(message)
