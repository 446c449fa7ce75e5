"""Messages and tools as OpenAI spells them, and the prompt that a renderer makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.renderers import Renderer, ToolSpec
from tinker_cookbook.renderers.core.messages import ensure_text, normalize_messages
from tinker_cookbook.server.openai.bodies import Tool
from tinker_cookbook.server.openai.errors import ApiError

_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")


def prompt_tokens(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[int]:
    """The tokens after which the next message is drawn."""
    if not messages:
        raise ApiError("messages: got none, expected one at least", param="messages")
    taken = [_taken(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _name_results(taken)
    normal = normalize_messages(taken)
    if tools:
        system = ""
        if normal[0]["role"] == "system":
            system, normal = ensure_text(normal[0]["content"]), normal[1:]
        specs = [_spec(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        prefix = renderer.create_conversation_prefix_with_tools(specs, system)
        normal = [*prefix, *normal]
    return renderer.build_generation_prompt(normal).to_ints()


def _taken(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    for field, value in message.items():
        if field not in _FIELDS and value not in (None, [], {}):
            raise ApiError(f"{where}.{field}: this server has no form for it", param=where)
    taken = {field: message[field] for field in _FIELDS if message.get(field) is not None}
    taken.setdefault("content", None)
    if taken.get("role") == "developer":
        taken["role"] = "system"  # its newer name
    if isinstance(taken["content"], list):
        taken["content"] = "".join(
            _text(part, f"{where}.content[{i}]") for i, part in enumerate(taken["content"])
        )
    return taken


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ApiError(
            f"{where}: got a part of type {kind!r}, expected text: the engine takes text alone",
            param=where,
        )
    return part["text"]


def _name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Gives results of tools the name of the function, which some chat formats write."""
    names: dict[Any, Any] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                names[call.get("id")] = call["function"].get("name")
        if message.get("role") == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id"))
            if name is not None:
                message["name"] = name


def _spec(tool: Tool, where: str) -> ToolSpec:
    function = tool.function
    if function.strict:
        raise ApiError(
            f"{where}.function.strict: arguments are not constrained to the schema; leave it out",
            param=where,
            code="unsupported_parameter",
        )
    return ToolSpec(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {"type": "object", "properties": {}},
    )
