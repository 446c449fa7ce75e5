"""Tool calls as JSON between tags: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers.messages import Message, ToolCall, ToolSpec, UnparsedToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAME_FIRST = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"arguments"\s*:\s*(?P<arguments>.*)\}\s*',
    re.DOTALL,
)


@dataclass(frozen=True)
class ParsedToolCalls:
    """Text apart from the calls, the calls that could be read, and those that could not."""

    text: str
    calls: list[ToolCall]
    unparsed: list[UnparsedToolCall]


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


def parse_tool_calls(text: str) -> ParsedToolCalls:
    """Splits a response into text and tool calls.

    The line break before each block belongs to the format, not to the text. A call that is cut off
    or no JSON becomes an ``UnparsedToolCall`` with its whole text, so that nothing is lost.
    """
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    outside: list[str] = []
    end = 0
    for block in _BLOCK.finditer(text):
        outside.append(text[end : block.start()].removesuffix("\n"))
        end = block.end()
        if not block[0].endswith(_CLOSE):
            unparsed.append(
                UnparsedToolCall(raw_text=block[0], error=f"tool call without {_CLOSE}")
            )
            continue
        try:
            calls.append(_parse_call(block[1]))
        except ValueError as error:
            unparsed.append(UnparsedToolCall(raw_text=block[0], error=str(error)))
    outside.append(text[end:])
    return ParsedToolCalls("".join(outside), calls, unparsed)


def _parse_call(body: str) -> ToolCall:
    match = _NAME_FIRST.fullmatch(body)
    if match:
        # Arguments keep the spelling the model gave them: written again, they are the same tokens.
        name, arguments = match["name"], match["arguments"].rstrip()
        json.loads(arguments)
    else:
        name, arguments = _from_json(json.loads(body))
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments))


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
