"""Tool calls between ``<tool_call>`` tags, as JSON or as XML, and the declaration of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
# Possessive quantifiers, so that long runs of white space take linear time.
_NAME_FIRST = re.compile(
    r'\s*+\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\]*+)"\s*+,\s*+"arguments"\s*+:\s*+'
    r"(?P<arguments>.*)\}\s*+",
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
    calls = [
        f'{_OPEN}\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}\n'
        f"{_CLOSE}"
        for call in message.get("tool_calls", [])
    ]
    return calls + [call.raw_text for call in message.get("unparsed_tool_calls", [])]


def read_json(text: str) -> Any:
    """Returns the value of JSON text.

    Raises ValueError for other text, for JSON that is nested beyond Python's stack, and for text
    with a lone surrogate, which no tokenizer can encode.
    """
    try:
        value = json.loads(text)
        to_json(value).encode()
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("the JSON contains half of a character (a lone surrogate)") from error
    return value


def tool_call(name: str, arguments: str, call_id: str | None = None) -> ToolCall:
    """Returns a call with its arguments as a JSON string."""
    function = ToolCall.FunctionBody(name=name, arguments=arguments)
    return ToolCall(function=function, id=call_id)


def read_json_call(body: str) -> list[ToolCall]:
    """Returns the call in a block of JSON; raises ValueError for anything else."""
    # Most models write the name first; then the arguments stay verbatim, so that the call renders
    # to the sampled tokens.
    if match := _NAME_FIRST.fullmatch(body):
        text = match["arguments"].rstrip()
        try:
            # A string is JSON that was encoded twice; other text has more fields or is no JSON.
            if not isinstance(json.loads(text), str):
                return [tool_call(match["name"], text)]
        except (ValueError, RecursionError):
            pass
    try:
        value = read_json(body)
    except json.JSONDecodeError as error:
        raise ValueError(f"Invalid JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('tool call: expected an object {"name": …, "arguments": …}')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        read_json(arguments)
    else:
        arguments = to_json(arguments)
    return [tool_call(value["name"], arguments)]


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


def to_json(value: Any) -> str:
    """Returns ``value`` as JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def json_tools(tools: Sequence[ToolSpec]) -> str:
    """Returns the declarations of tools as JSON, one a line."""
    return "\n".join(to_json(as_openai_tool(tool)) for tool in tools)


def declare_tools(tools: Sequence[ToolSpec], system_prompt: str) -> str:
    """Returns the system text that declares tools in the Hermes form which Qwen's templates use."""
    if not tools:
        return system_prompt
    before = f"{system_prompt}\n\n" if system_prompt else ""
    return (
        f"{before}# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{json_tools(tools)}\n</tools>\n\nFor each function call, return a json object with "
        "function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<inside>.*)</function>\s*", re.DOTALL)
# A value ends at the first closing tag that another parameter or the end of the function follows:
# values may contain closing tags.
_PARAMETER = re.compile(
    r"\s*+<parameter=(?P<name>[^>\n]++)>\n?(?P<value>.*?)\n?</parameter>"
    r"(?=\s*+(?:<parameter=|\Z))",
    re.DOTALL,
)
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}

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
    blocks: list[str] = []
    for call, arguments in calls_with_arguments(message, idx):
        parameters = ""
        for name, value in arguments.items():
            if not isinstance(value, str):
                as_json = json_scalars or isinstance(value, (dict, list))
                value = to_json(value) if as_json else str(value)
            parameters += f"<parameter={name}>\n{value}\n</parameter>\n"
        name = call.function.name
        blocks.append(f"{_OPEN}\n<function={name}>\n{parameters}</function>\n{_CLOSE}")
    return blocks + [call.raw_text for call in message.get("unparsed_tool_calls", [])]


def calls_with_arguments(message: Message, idx: int) -> Iterator[tuple[ToolCall, dict[str, Any]]]:
    """Yields each call with its arguments; raises RendererError unless they are a JSON object."""
    for i, call in enumerate(message.get("tool_calls", [])):
        written = call.function.arguments
        try:
            arguments = read_json(written)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RendererError(
                f"messages[{idx}].tool_calls[{i}].function.arguments: got {written!r}, expected a "
                "JSON object in a string: this chat format writes arguments one by one; use "
                '"{}" for none'
            )
        yield call, arguments


def read_xml_call(body: str) -> list[ToolCall]:
    """Returns the call in a block of XML; raises ValueError for anything else."""
    function = _FUNCTION.fullmatch(body)
    if not function:
        raise ValueError("tool call: expected <function=name>, parameters and </function>")
    expected = "<parameter=name>, its value and </parameter>"
    arguments = read_bare_arguments(function["inside"], _PARAMETER, expected)
    return [tool_call(function["name"], arguments)]


def read_bare_arguments(text: str, pattern: re.Pattern[str], expected: str) -> str:
    """Returns consecutive ``name`` and ``value`` groups of ``pattern`` as a JSON object.

    Raises ValueError for a name that occurs twice and for other text.
    """
    arguments: dict[str, Any] = {}
    end = 0
    # Matched at one position only: a search would try every white space again.
    while match := pattern.match(text, end):
        if match["name"] in arguments:
            raise ValueError(f"tool call: argument {match['name']!r} is given twice")
        arguments[match["name"]] = _read_bare_value(match["value"])
        end = match.end()
    if rest := text[end:].strip():
        raise ValueError(f"tool call: expected {expected}, got {rest[:100]!r}")
    return to_json(arguments)


def typed_arguments(arguments: str, schema: Mapping[str, Any]) -> str:
    """Returns the arguments of a call with the types of the tool's schema.

    For chat formats that write strings without quotes, where the parser can only guess: ``12`` is a
    number, but the text "12" if the schema says string. A value that fits no type is unchanged.
    """
    values, properties = json.loads(arguments), schema.get("properties") or {}
    return to_json(
        {name: _typed(value, properties.get(name, True), schema) for name, value in values.items()}
    )


def _typed(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    candidates = [value]
    if isinstance(value, str):
        try:
            candidates.append(_WORDS[value] if value in _WORDS else read_json(value))
        except ValueError:
            return value
    else:
        candidates.append(to_json(value))
    return next((one for one in candidates if _fits(one, schema, root)), value)


def _fits(value: Any, schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Returns whether a value has a type, or is one of the values, of a schema."""
    if not isinstance(schema, Mapping) or depth > 8:
        return True
    if "$ref" in schema:
        found: Any = root
        for key in str(schema["$ref"]).removeprefix("#/").split("/"):
            found = found.get(key, {}) if isinstance(found, Mapping) else {}
        return _fits(value, found, root, depth + 1)
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(one) is type(value) and one == value for one in allowed)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(_fits(value, option, root, depth + 1) for option in options)
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return not kinds or any(_has_type(value, kind) for kind in kinds)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds = {"string": str, "number": (int, float), "array": list, "object": dict}
    return isinstance(value, kinds.get(kind, ()))


# The line breaks before a block belong to the format.
XML_CALL = Block(_OPEN, _CLOSE, read=read_xml_call, before=("\n\n", "\n"))
"""A call as XML between tags."""


def _read_bare_value(text: str) -> Any:
    """Returns the value of ``text`` as JSON, or ``text`` itself.

    The XML form has no types: ``12`` may be a number or a string, and is read as the number. A
    number counts only in its canonical spelling, because ``1.10`` may be a version.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
        # Compare with the canonical spelling below; raises for NaN and Infinity, which are no JSON,
        # and for a lone surrogate, which cannot be written again.
        spelled = json.dumps(value, ensure_ascii=False, allow_nan=False)
        spelled.encode()
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text
    return value if isinstance(value, (dict, list)) or spelled == text else text
