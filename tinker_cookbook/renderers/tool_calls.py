"""Tool calls as JSON between tags: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.renderers.blocks import Block
from tinker_cookbook.renderers.messages import Message, ToolCall, ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME_FIRST = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"arguments"\s*:\s*(?P<arguments>.*)\}\s*',
    re.DOTALL,
)


def as_openai_tool(tool: ToolSpec) -> dict[str, Any]:
    """Returns the declaration of a tool as chat templates expect it; one already so stays."""
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def format_tool_calls(message: Message) -> list[str]:
    """Returns each call of the message as a tagged block, arguments as they are spelled."""
    blocks = [
        f'{_OPEN}\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}\n'
        f"{_CLOSE}"
        for call in message.get("tool_calls", [])
    ]
    return blocks + [call.raw_text for call in message.get("unparsed_tool_calls", [])]


def read_json_call(body: str) -> list[ToolCall]:
    """Returns the call that a block says; ValueError where it is none."""
    match = _NAME_FIRST.fullmatch(body)
    if match:
        # Arguments keep the spelling the model gave them: written again, they are the same tokens.
        name, arguments = match["name"], match["arguments"].rstrip()
        json.loads(arguments)
    else:
        name, arguments = _from_json(json.loads(body))
    return [ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments))]


# The line break before a block belongs to the format, not to the text.
JSON_CALL = Block(_OPEN, _CLOSE, read=read_json_call, before=("\n",))
"""A call as JSON between tags."""


def _from_json(call: Any) -> tuple[str, str]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('tool call: expected an object {"name": …, "arguments": …}')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        json.loads(arguments)
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def declare_tools(tools: Sequence[ToolSpec], system_prompt: str) -> str:
    """Returns the system text that declares tools in the Hermes form which Qwen's templates use."""
    if not tools:
        return system_prompt
    declared = "".join(
        "\n" + json.dumps(as_openai_tool(tool), ensure_ascii=False) for tool in tools
    )
    before = f"{system_prompt}\n\n" if system_prompt else ""
    return (
        f"{before}# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
        f"{declared}\n</tools>\n\nFor each function call, return a json object with function name "
        "and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
