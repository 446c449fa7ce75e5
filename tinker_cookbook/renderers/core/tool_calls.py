"""Tool calls between ``<tool_call>`` tags, as JSON or as XML, and the declaration of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.messages import (
    ContentPart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.renderers.core.parsing import unread

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINKING_OR_CALL = re.compile(
    r"<think>(?P<thinking>.*?)</think>|<tool_call>(?P<call>.*?)</tool_call>", re.DOTALL
)
_NAME_FIRST = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"arguments"\s*:\s*(?P<arguments>.*)\}\s*',
    re.DOTALL,
)


def as_openai_tool(tool: ToolSpec) -> dict[str, Any]:
    """Returns the declaration of a tool in OpenAI's form, which chat templates expect."""
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of the OpenAI API with call arguments as objects, as several templates
    expect; unchanged where arguments are not JSON."""
    if not message.get("tool_calls"):
        return message
    calls: list[Any] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        try:
            function["arguments"] = json.loads(function["arguments"])
        except (TypeError, ValueError):
            return message
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def format_tool_calls(message: Message) -> list[str]:
    """Returns each call of the message as a tagged block, with its arguments verbatim."""
    blocks = [
        f'{_OPEN}\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}\n'
        f"{_CLOSE}"
        for call in message.get("tool_calls", [])
    ]
    return blocks + [call.raw_text for call in message.get("unparsed_tool_calls", [])]


def read_json_call(body: str) -> list[ToolCall]:
    """Returns the call in a block of JSON; raises ValueError for anything else."""
    # Most models write the name first; then the arguments are kept verbatim.
    match = _NAME_FIRST.fullmatch(body)
    if match:
        # Arguments stay verbatim, so that the call renders to the sampled tokens.
        name, arguments = match["name"], match["arguments"].rstrip()
        _loads(arguments)
    else:
        name, arguments = _from_json(_loads(body))
    return [ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments))]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"Invalid JSON: {error}") from error


def read_calls_in_row(
    body: str,
    pattern: re.Pattern[str],
    call_of: Callable[[re.Match[str]], ToolCall],
    expected: str = "a call",
) -> list[ToolCall]:
    """Returns consecutive matches of ``pattern`` as calls; raises ValueError for anything else."""
    calls: list[ToolCall] = []
    at = 0
    while at < len(body) or not calls:
        found = pattern.match(body, at)
        if found is None:
            raise ValueError(
                f"tool call {len(calls)}: got {body[at : at + 80]!r}, expected {expected}"
            )
        calls.append(call_of(found))
        at = found.end()
    return calls


# The line break before a block belongs to the format.
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


def parse_content_blocks(
    content: str,
) -> tuple[list[ContentPart], list[ToolCall | UnparsedToolCall]] | None:
    """Splits text into thinking and text parts, and the calls between ``<tool_call>`` tags.

    White space is unchanged; a block that is not closed is text. Returns None without such tags.
    """
    if "<think>" not in content and _OPEN not in content:
        return None
    parts: list[ContentPart] = []
    calls: list[ToolCall | UnparsedToolCall] = []
    end = 0
    for block in _THINKING_OR_CALL.finditer(content):
        parts.append(TextPart(type="text", text=content[end : block.start()]))
        end = block.end()
        if block["thinking"] is not None:
            parts.append(ThinkingPart(type="thinking", thinking=block["thinking"]))
            continue
        try:
            calls += read_json_call(block["call"])
        except ValueError as error:
            calls.append(unread(block[0], error))
    parts.append(TextPart(type="text", text=content[end:]))
    return [part for part in parts if part.get("text") or part.get("thinking")], calls


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


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<inside>.*)</function>\s*", re.DOTALL)
# A value ends at the first closing tag that another parameter or the end of the function follows:
# values may contain closing tags.
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
    re.DOTALL,
)
_CONSTANTS = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}

XML_CALL_INSTRUCTIONS = (
    "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
    "</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second parameter\n"
    "that can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\n"
    "Reminder:\n- Function calls MUST follow the specified format: an inner "
    "<function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the "
    "function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n</IMPORTANT>"
)
"""Instructions on the XML form that templates write after the declarations of tools."""


def format_xml_calls(message: Message, idx: int, *, json_scalars: bool = False) -> list[str]:
    """Returns each call of the message as a tagged block without line breaks around it.

    ``idx`` is the index of the message, for errors. Strings are written bare, objects and lists as
    JSON; numbers, booleans and null as by Python's ``str`` (``True``, ``None``), or with
    ``json_scalars`` as JSON (``true``, ``null``). Unparsed calls are written verbatim. Raises
    RendererError for arguments that are no JSON object.
    """
    blocks = [
        _format_call(call, f"messages[{idx}].tool_calls[{i}].function.arguments", json_scalars)
        for i, call in enumerate(message.get("tool_calls", []))
    ]
    return blocks + [call.raw_text for call in message.get("unparsed_tool_calls", [])]


def arguments_of(call: ToolCall, where: str) -> dict[str, Any]:
    """Returns the arguments of a call; raises RendererError unless they are a JSON object."""
    written = call.function.arguments
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):  # the latter: brackets without end
        arguments = None
    if not isinstance(arguments, dict):
        raise RendererError(
            f"{where}: got {written!r}, expected a JSON object in a string: this chat format "
            'writes arguments one by one; use "{}" for none'
        )
    return arguments


def _format_call(call: ToolCall, where: str, json_scalars: bool) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{_spell(value, json_scalars)}\n</parameter>\n"
        for name, value in arguments_of(call, where).items()
    )
    return f"{_OPEN}\n<function={call.function.name}>\n{parameters}</function>\n{_CLOSE}"


def _spell(value: Any, json_scalars: bool) -> str:
    if isinstance(value, str):
        return value
    if json_scalars or isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def read_xml_call(body: str) -> list[ToolCall]:
    """Returns the call in a block of XML; raises ValueError for anything else."""
    function = _FUNCTION.fullmatch(body)
    if not function:
        raise ValueError("tool call: expected <function=name>, parameters and </function>")
    expected = "<parameter=name>, its value and </parameter>"
    arguments = read_bare_arguments(function["inside"], _PARAMETER, expected)
    return [ToolCall(function=ToolCall.FunctionBody(name=function["name"], arguments=arguments))]


def read_bare_arguments(text: str, pattern: re.Pattern[str], expected: str) -> str:
    """Returns consecutive ``name`` and ``value`` groups of ``pattern`` as a JSON object.

    Raises ValueError for a name that occurs twice and for other text.
    """
    arguments: dict[str, Any] = {}
    end = 0
    for match in pattern.finditer(text):
        if match.start() != end:
            break
        if match["name"] in arguments:
            raise ValueError(f"tool call: argument {match['name']!r} is given twice")
        arguments[match["name"]] = _read_bare_value(match["value"])
        end = match.end()
    if rest := text[end:].strip():
        raise ValueError(f"tool call: expected {expected}, got {rest[:100]!r}")
    return json.dumps(arguments, ensure_ascii=False)


# The line breaks before a block belong to the format.
XML_CALL = Block(_OPEN, _CLOSE, read=read_xml_call, before=("\n\n", "\n"))
"""A call as XML between tags."""


def _read_bare_value(text: str) -> Any:
    """Returns the value of ``text`` as JSON, or ``text`` itself.

    The XML form has no types: ``12`` may be a number or a string, and is read as the number. A
    number counts only in its canonical spelling, because ``1.10`` may be a version.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # Compare with the canonical spelling below.
        spelled = json.dumps(value, ensure_ascii=False)
        spelled.encode()  # raises for a lone surrogate, which cannot be written again
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text
    return value if isinstance(value, (dict, list)) or spelled == text else text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
