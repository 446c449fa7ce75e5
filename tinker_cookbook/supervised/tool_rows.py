"""Rows with their tools apart from the messages, as the OpenAI API, Hugging Face and TRL have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, Renderer, ToolSpec, get_text_content

_EXPECTED = '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'


def tools_of_row(row: Mapping[str, Any]) -> list[ToolSpec]:
    """The tools that a row declares in its key ``tools``: a list, or one as JSON text.

    Raises:
        RendererError: They are declared in another way.
    """
    tools = row.get("tools")
    if row.get("functions"):
        raise RendererError(f"got 'functions', expected 'tools': a list of {_EXPECTED}")
    if isinstance(tools, str):  # a column of JSON text, where rows have tools of different shapes
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RendererError(
                f"tools: got a text that is not JSON ({error}), expected a list of {_EXPECTED}"
            ) from error
    if not tools:
        return []
    if not isinstance(tools, Sequence):
        raise RendererError(f"tools: got {type(tools).__name__}, expected a list of {_EXPECTED}")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def with_tools(
    messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer
) -> list[Message]:
    """The conversation with the tools declared in the renderer's own form.

    A system message at the beginning goes into the declaration.

    Raises:
        RendererError: The chat format declares no tools.
    """
    if not tools:
        return list(messages)
    system = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
    prompt = "" if system is None else get_text_content(system)
    prefix = renderer.create_conversation_prefix_with_tools(tools, prompt)
    if any("trainable" in message for message in messages):
        # train_on_what=customized expects the mark on every message.
        mark = system.get("trainable", False) if system is not None else False
        for message in prefix:
            message["trainable"] = mark
    return [*prefix, *messages[0 if system is None else 1 :]]


def _tool(tool: Any, where: str) -> ToolSpec:
    body = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
        raise RendererError(f"{where}: got {tool!r}, expected {_EXPECTED}")
    if tool.get("type", "function") != "function":
        raise RendererError(
            f"{where}.type: got {tool['type']!r}, expected 'function'; chat formats declare no "
            "other kind of tool"
        )
    return ToolSpec(
        name=body["name"],
        description=body.get("description") or "",
        parameters=body.get("parameters") or {"type": "object", "properties": {}},
    )
