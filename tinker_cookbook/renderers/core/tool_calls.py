"""Tool calls between ``<tool_call>`` tags, as JSON or as XML, and the declaration of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.arguments import (
    BareArguments,
    arguments_text,
    read_json,
    to_json,
    typed_arguments,
)
from tinker_cookbook.renderers.core.blocks import Block
from tinker_cookbook.renderers.core.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    checked_arguments,
)

TOOL_SHAPE = (
    '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'
)
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def json_before(closing: str) -> str:
    """Returns the pattern (for re.DOTALL) of JSON up to the first ``closing`` that is not part of a
    string."""
    first, rest = re.escape(closing[0]), re.escape(closing[1:])
    return rf'(?:[^"{first}]++|"(?:[^"\\]++|\\.)*+"|{first}(?!{rest}))*+(?={first}{rest})'


# Possessive quantifiers, so that long runs of white space take linear time.
_NAME_FIRST = re.compile(
    r'\s*+\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\]*+)"\s*+,\s*+"arguments"\s*+:\s*+'
    r"(?P<arguments>.*)\}\s*+",
    re.DOTALL,
)


def as_openai_tool(tool: ToolSpec) -> dict[str, Any]:
    """Returns the declaration of a tool in OpenAI's form, which chat templates expect."""
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def read_tool(tool: Any, where: str) -> ToolSpec:
    """Returns a declaration in OpenAI's form; raises RendererError that starts with ``where``."""
    # OpenAI's nested form and the bare declaration are both accepted.
    body = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
        raise RendererError(f"{where}: got {tool!r}, expected {TOOL_SHAPE}")
    if (tool.get("type") or "function") != "function":
        raise RendererError(
            f"{where}.type: got {tool['type']!r}, expected 'function'; chat formats declare "
            "no other kind of tool"
        )
    parameters = body.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise RendererError(f"{where}.parameters: got {parameters!r:.80}, expected a JSON schema")
    return ToolSpec(
        name=body["name"], description=body.get("description") or "", parameters=dict(parameters)
    )


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


def tool_call(name: str, arguments: str, call_id: str | None = None) -> ToolCall:
    """Returns a call with its arguments as a JSON string."""
    # model_construct keeps BareArguments; validation would make them a plain string.
    function = ToolCall.FunctionBody.model_construct(name=name, arguments=arguments)
    return ToolCall(function=function, id=call_id)


def typed_call(call: ToolCall, schema: Mapping[str, Any] | None) -> ToolCall:
    """Returns the call with the types of the tool's schema, for chat formats that write none."""
    written = call.function.arguments
    typed = typed_arguments(written, schema or {})
    return call if typed is written else tool_call(call.function.name, typed, call.id)


def json_end(closing: str) -> Callable[[str], int]:
    """Returns the function that finds the first ``closing`` outside of JSON strings, else -1."""
    pattern = re.compile(json_before(closing), re.DOTALL)

    def find(text: str) -> int:
        found = pattern.match(text)
        return -1 if found is None else found.end()

    return find


def read_json_call(body: str) -> list[ToolCall]:
    """Returns the call in a block of JSON; raises ValueError for anything else."""
    # Most models write the name first; then the arguments stay verbatim, so that the call renders
    # to the sampled tokens.
    if match := _NAME_FIRST.fullmatch(body):
        text = match["arguments"].rstrip()
        try:
            return [tool_call(match["name"], arguments_text(read_json(text) and text))]
        except ValueError:  # a string is JSON that was encoded twice; other text has more fields
            pass
    try:
        value = read_json(body)
    except json.JSONDecodeError as error:
        raise ValueError(f"Invalid JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('tool call: expected an object {"name": …, "arguments": …}')
    return [tool_call(value["name"], arguments_text(value.get("arguments")))]


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
JSON_CALL = Block(_OPEN, _CLOSE, read=read_json_call, before=("\n",), find_end=json_end(_CLOSE))
"""A call as JSON between tags."""


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
        where = f"messages[{idx}].tool_calls[{i}].function.arguments"
        yield call, read_json(checked_arguments(call.function.arguments, where))


def results_in_call_order(
    messages: Sequence[Message], turn: Sequence[Role] = ("tool",), *, known_only: bool = True
) -> list[Message]:
    """Returns the messages with the results of an answer's calls in the order of the calls.

    Results change places within a run of messages of the roles ``turn``. With ``known_only``, they
    keep their order unless each id is that of another call of the answer before the run; without,
    an unknown id counts as that of the first call.
    """
    ordered = list(messages)
    calls: list[str | None] = []
    start = 0
    for i, message in enumerate([*messages, None]):
        if message is not None and message["role"] in turn:
            continue
        slots = [j for j in range(start, i) if ordered[j]["role"] == "tool"]
        ids = [ordered[j].get("tool_call_id") for j in slots]
        known = {*ids} <= {*calls} - {None}
        if not known_only or (known and len({*ids}) == len(ids) and len({*calls}) == len(calls)):
            order = {call: number for number, call in enumerate(calls) if call}
            numbers = [order.get(result_id or "", 0) for result_id in ids]
            results = [ordered[j] for j in slots]
            by_call = sorted(range(len(ids)), key=numbers.__getitem__)
            for slot, k in zip(slots, by_call, strict=True):
                ordered[slot] = results[k]
        made = [call.id for call in message.get("tool_calls", [])] if message else []
        calls = made if made or known_only else calls
        start = i + 1
    return ordered


def read_xml_call(body: str) -> list[ToolCall]:
    """Returns the call in a block of XML; raises ValueError for anything else."""
    function = _FUNCTION.fullmatch(body)
    if not function:
        raise ValueError("tool call: expected <function=name>, parameters and </function>")
    expected = "<parameter=name>, its value and </parameter>"
    arguments = read_bare_arguments(function["inside"], _PARAMETER, expected)
    return [tool_call(function["name"], arguments)]


def read_bare_arguments(text: str, pattern: re.Pattern[str], expected: str) -> BareArguments:
    """Returns consecutive ``name`` and ``value`` groups of ``pattern`` as arguments.

    Raises ValueError for a name that occurs twice and for other text.
    """
    texts: dict[str, str] = {}
    end = 0
    # Matched at one position only: a search would try every white space again.
    while match := pattern.match(text, end):
        if match["name"] in texts:
            raise ValueError(f"tool call: argument {match['name']!r} is given twice")
        texts[match["name"]] = match["value"]
        end = match.end()
    if rest := text[end:].strip():
        raise ValueError(f"tool call: expected {expected}, got {rest[:100]!r}")
    return BareArguments(texts)


def tags_end(closing: str, *inner: tuple[str, str]) -> Callable[[str], int]:
    """Returns the function that finds the ``closing`` of a block of tags, else -1: every ``inner``
    opening before it has been closed, the first kind of them directly before it."""

    def is_whole(body: str) -> bool:
        (opening, last), *_ = inner
        if opening not in body:
            return True
        return body.rstrip().endswith(last) and all(
            body.count(opening) <= body.count(end) for opening, end in inner
        )

    def find(text: str) -> int:
        at = text.find(closing)
        while at >= 0 and not is_whole(text[:at]):
            at = text.find(closing, at + 1)
        return at

    return find


# The line breaks before a block belong to the format.
XML_CALL = Block(
    _OPEN,
    _CLOSE,
    read=read_xml_call,
    before=("\n\n", "\n"),
    find_end=tags_end(_CLOSE, ("<function=", "</function>"), ("<parameter=", "</parameter>")),
)
"""A call as XML between tags."""
