"""Roles of messages: the names chat formats accept, and their names in other data formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError, nearest

ROLES = ("system", "user", "assistant", "tool", "developer")

# Roles of single chat formats: declarations of tools (Kimi K2, Mistral) and tool results (Llama 3).
_OF_ONE_FORMAT = ("tool_declare", "available_tools", "ipython")
_ELSEWHERE = {
    "human": "user",
    "prompter": "user",
    "instruction": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}


def check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses data with a role that no chat format knows; most formats would render it as it is.

    Raises:
        RendererError: Names the message, the role and the nearest one.
    """
    for i, message in enumerate(messages):
        role = message["role"]
        if role in ROLES or role in _OF_ONE_FORMAT:
            continue
        meant = _ELSEWHERE.get(str(role).lower())
        hint = f"; did you mean {meant!r}?" if meant else nearest(str(role), ROLES)
        raise RendererError(
            f"messages[{i}].role: got {role!r}, expected one of {', '.join(ROLES)}{hint}"
        )
