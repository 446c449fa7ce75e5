"""Harmony messages, the format of gpt-oss: parsing, writing, and the declaration of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.messages import Message, ToolCall, ToolSpec, ensure_list
from tinker_cookbook.renderers.core.parsing import (
    ContentDelta,
    MessageReader,
    partial_at_end,
    unread,
    unterminated,
)
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONSTRAIN = "<|constrain|>"
FUNCTIONS = "functions."

# The recipient follows the role, as in the chat template, or the channel, as models often write it;
# the content type may have <|constrain|>.
_HEADER = re.compile(
    r"(?P<start><\|start\|>assistant)?(?: to=(?P<by_role>[^\s<]+))?"
    r"<\|channel\|>(?P<channel>\w+)(?: to=(?P<by_channel>[^\s<]+))?"
    r"(?:(?: ?<\|constrain\|>| )[\w.+/-]+)?\s*"
)
_RECIPIENT = re.compile(r" to=([^\s<]+)")
_CALL_BEGUN = re.compile(r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=[^\s<]")
_PARTS = {"analysis": "thinking", "final": "text", "commentary": "text"}
_LONGEST_HEADER = 512  # characters; longer text has no header


def recipient(raw_call: str) -> str | None:
    """Returns the recipient of an unparsed call, None if it has none."""
    found = _RECIPIENT.search(raw_call.partition(MESSAGE)[0])
    return found[1] if found else None


class HarmonyReader(MessageReader):
    """Parser of messages on channels; text without a valid header is text.

    Consecutive messages of one kind join to one content part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffer = ""
        self._state = "header"  # or what the message is: thinking, text, call
        self._first = True
        self._header = ""  # of the call

    def feed(self, text: str) -> list[ContentDelta]:
        """Parses more text; headers, calls and what may begin ``<|end|>`` are buffered."""
        self._buffer += text
        deltas: list[ContentDelta] = []
        while self._state != "call":
            before = self._state, len(self._buffer)
            deltas += self._read_header() if self._state == "header" else self._read_body()
            if (self._state, len(self._buffer)) == before:
                break
        return deltas

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer; a header without its end is text, or a call that was cut off."""
        rest, self._buffer = self._buffer, ""
        if self._state == "call":
            self._read_call(rest)
            return []
        if self._state == "header" and _CALL_BEGUN.match(rest):
            self.unparsed.append(unterminated(self._call_text(rest), " to=", CALL))
            return []
        return self.add_thinking(rest) if self._state == "thinking" else self.add_text(rest)

    def _read_header(self) -> list[ContentDelta]:
        window = self._buffer[: _LONGEST_HEADER + len(MESSAGE)]
        at, end = window.find(MESSAGE), window.find(END)
        # Without a header the message is text, once it is too long for a header or has ended.
        if at < 0 or 0 <= end < at:
            if end >= 0 or len(self._buffer) >= _LONGEST_HEADER + len(MESSAGE):
                self._state = "text"
            return []
        header = self._buffer[:at]
        match = _HEADER.fullmatch(header)
        # A second message has to begin with <|start|>assistant.
        if match is None or not (self._first or match["start"]):
            self._state = "text"
            return []
        if match["by_role"] or match["by_channel"]:
            self._state, self._header = "call", self._call_text(header + MESSAGE)
        elif match["channel"] in _PARTS:
            self._state = _PARTS[match["channel"]]
        else:
            self._state = "text"
            return []
        self._buffer = self._buffer[at + len(MESSAGE) :]
        return []

    def _read_body(self) -> list[ContentDelta]:
        add = self.add_thinking if self._state == "thinking" else self.add_text
        at = self._buffer.find(END)
        if at < 0:
            ready = len(self._buffer) - partial_at_end(self._buffer, (END,))
            text, self._buffer = self._buffer[:ready], self._buffer[ready:]
            return add(text)
        text, self._buffer = self._buffer[:at], self._buffer[at + len(END) :]
        self._state, self._first = "header", False
        return add(text)

    def _read_call(self, body: str) -> None:
        to = recipient(self._header) or ""
        try:
            if not to.startswith(FUNCTIONS):
                raise ValueError(f"tool call: to {to!r}, expected a recipient {FUNCTIONS}NAME")
            if not isinstance(json.loads(body), dict):
                raise ValueError("tool call: expected a JSON object of arguments")
        except (ValueError, RecursionError) as error:
            raw = self._header + body
            self.unparsed.append(unread(raw, error))
            return
        # Arguments stay verbatim, so that the call renders to the sampled tokens.
        function = ToolCall.FunctionBody(name=to.removeprefix(FUNCTIONS), arguments=body)
        self.calls.append(ToolCall(function=function))

    def _call_text(self, text: str) -> str:
        """Returns the call without ``<|start|>assistant``, which rendering adds again."""
        return text.removeprefix(f"{START}assistant")


ASSISTANT = f"{START}assistant"
_TAGS = tuple(f"{CHANNEL}{channel}{MESSAGE}" for channel in ("analysis", "final"))


def calls_tool(message: Message) -> bool:
    """Returns whether the message calls a tool, also in an unparsed call."""
    return bool(message.get("tool_calls") or message.get("unparsed_tool_calls"))


def is_answer(message: Message) -> bool:
    """Returns whether the message ends a turn of the assistant."""
    return message["role"] == "assistant" and not calls_tool(message)


def called_tool(message: Message) -> str | None:
    """Returns the recipient of the message's call, None if it has no call."""
    for call in message.get("tool_calls", []):
        return FUNCTIONS + call.function.name
    unparsed = message.get("unparsed_tool_calls", [])
    return recipient(unparsed[0].raw_text) if unparsed else None


def tag_in(message: Message) -> str | None:
    """Returns a header in the text of the message, where none should be."""
    texts = [text for _, text in _runs(message)]
    return next((tag for tag in _TAGS if any(tag in text for text in texts)), None)


def write_answer(message: Message, *, last: bool, thinks: bool) -> str:
    """Returns what follows ``<|start|>assistant`` in a message without calls.

    The last run of text is the answer; text before thinking is a preamble. ``thinks`` writes
    thinking, ``last`` ends the answer with ``<|return|>``.
    """
    runs = _runs(message)
    # An answer without text still has an empty final message.
    answer = runs.pop()[1] if runs and runs[-1][0] == "text" else ""
    end = f"{CHANNEL}final{MESSAGE}{answer}{RETURN if last else END}"
    parts = [_part(kind, text) for kind, text in runs if thinks or kind == "text"]
    return ASSISTANT.join([*parts, end])


def write_call(
    message: Message, idx: int, *, thinks: bool, text_as_thinking: bool, as_template: bool
) -> str:
    """Returns what follows ``<|start|>assistant`` in a message with calls.

    ``as_template`` omits ``<|constrain|>`` and allows one call. Raises RendererError for further
    calls, for arguments that are no JSON object, and for text beside thinking where text is
    written as thinking.
    """
    # Empty parts have no message of their own.
    runs = [(kind, text) for kind, text in _runs(message) if text]
    if text_as_thinking:
        if len(runs) > 1:
            raise RendererError(
                f"messages[{idx}].content: got thinking and text beside a tool call, expected one "
                "of them: text_before_call=analysis writes both on one channel; leave the option "
                "out, or drop one of them"
            )
        runs = [("thinking", text) for _, text in runs]
    parts = [_part(kind, text) for kind, text in runs if thinks or kind == "text"]
    calls = [call + CALL for call in _calls(message, idx, as_template)]
    return ASSISTANT.join([*parts, *calls])


def _runs(message: Message) -> list[tuple[str, str]]:
    """Returns the content as alternating runs of ``thinking`` and ``text``."""
    content = ensure_list(message["content"])
    parts = [(part["type"], str(part.get("text", part.get("thinking", "")))) for part in content]
    grouped = groupby(parts, key=lambda part: part[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in grouped]


def _part(kind: str, text: str) -> str:
    channel = "analysis" if kind == "thinking" else "commentary"
    return f"{CHANNEL}{channel}{MESSAGE}{text}{END}"


def _calls(message: Message, idx: int, as_template: bool) -> list[str]:
    calls, unparsed = message.get("tool_calls", []), message.get("unparsed_tool_calls", [])
    if as_template and len(calls) + len(unparsed) != 1:
        raise RendererError(
            f"messages[{idx}].tool_calls: got {len(calls) + len(unparsed)} calls, expected one: "
            "the chat template of gpt-oss writes one call a message; split the message, each part "
            "followed by the result of its call, or leave out tool_format=template"
        )
    written = [
        _call(call, f"messages[{idx}].tool_calls[{i}]", as_template) for i, call in enumerate(calls)
    ]
    return [*written, *(call.raw_text for call in unparsed)]


def _call(call: ToolCall, where: str, as_template: bool) -> str:
    function = call.function
    try:
        arguments = json.loads(function.arguments)
    except ValueError as error:
        arguments = error
    if not isinstance(arguments, dict):
        raise RendererError(
            f"{where}.function.arguments: got {function.arguments!r}, expected a JSON object"
        )
    kind = "json" if as_template else f"{CONSTRAIN}json"
    return f" to={FUNCTIONS}{function.name}{CHANNEL}commentary {kind}{MESSAGE}{function.arguments}"


NAMESPACE_OPEN = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
NAMESPACE_CLOSE = "} // namespace functions"
_PLAIN_TYPES = {"number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM_TYPE = 50
_AFTER_UNION_BAR = " | \n"
_BEFORE_VARIANT_DEFAULT = " " * 20
_BEFORE_PROPERTY_TYPE = "\n" + " " * 16


def declare_functions(tools: Sequence[ToolSpec]) -> str:
    """Returns the section of the developer message that declares ``tools``."""
    declared = "".join(_declare(as_openai_tool(tool)["function"]) for tool in tools)
    return f"{NAMESPACE_OPEN}{declared}{NAMESPACE_CLOSE}"


def to_json(value: Any) -> str:
    """Returns ``value`` as JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _declare(tool: Mapping[str, Any]) -> str:
    parameters = tool.get("parameters") or {}
    head = f"// {tool.get('description') or ''}\ntype {tool['name']} = "
    properties = parameters.get("properties")
    if not properties:
        return f"{head}() => any;\n\n"
    required = parameters.get("required") or []
    lines = "".join(_parameter(name, spec, required) for name, spec in properties.items())
    return f"{head}(_: {{\n{lines}}}) => any;\n\n"


def _parameter(name: str, spec: Any, required: Sequence[str]) -> str:
    spec = _schema(spec)
    comment = f"// {spec['description']}\n" if spec.get("description") else ""
    default = ""
    if "default" in spec:
        # Quirk of the template: a default of an enumeration or a union is not JSON.
        value = spec["default"]
        if spec.get("enum"):
            default = f", // default: {value}"
        elif spec.get("oneOf"):
            default = f"// default: {value}"
        else:
            default = f", // default: {to_json(value)}"
    return f"{comment}{_key(name, required)}: {_type(spec)}{default},\n"


def _key(name: str, required: Sequence[str]) -> str:
    return name if name in required else f"{name}?"


def _type(schema: Any) -> str:
    spec = _schema(schema)
    kind = spec.get("type")
    nullable = " | null" if spec.get("nullable") else ""
    if kind == "array":
        return f"{_item_type(spec.get('items'))}[]{nullable}"
    if isinstance(kind, Sequence) and not isinstance(kind, str) and kind:
        return " | ".join(map(str, kind))
    if spec.get("oneOf"):
        return _AFTER_UNION_BAR.join(map(_variant, spec["oneOf"]))
    if kind == "string":
        if spec.get("enum"):
            return '"' + '" | "'.join(map(str, spec["enum"])) + '"'
        return f"string{nullable}"
    if kind == "object":
        return _object_type(spec)
    return _PLAIN_TYPES.get(kind, "any") if isinstance(kind, str) else "any"


def _item_type(items: Any) -> str:
    if not items:
        return "any"
    kind = _schema(items).get("type")
    if kind == "string":
        return "string"  # of an enumeration too
    if isinstance(kind, str) and kind in _PLAIN_TYPES:
        return _PLAIN_TYPES[kind]
    inner = _type(items)
    return "any" if inner == "object | object" or len(inner) > _LONGEST_ITEM_TYPE else inner


def _object_type(spec: Mapping[str, Any]) -> str:
    if not spec.get("properties"):
        return "object"
    required = spec.get("required") or []
    fields = ", ".join(
        f"{_key(name, required)}: {_BEFORE_PROPERTY_TYPE}{_type(field)}"
        for name, field in spec["properties"].items()
    )
    return f"{{\n{fields}}}"


def _variant(variant: Any) -> str:
    spec = _schema(variant)
    comment = f"// {spec['description']}" if spec.get("description") else ""
    default = ""
    if "default" in spec:
        default = f"{_BEFORE_VARIANT_DEFAULT}// default: {to_json(spec['default'])}"
    return f"{_type(spec)}{comment}{default}"


def _schema(schema: Any) -> Mapping[str, Any]:
    """Returns a schema as an object; true and false have no type."""
    return schema if isinstance(schema, Mapping) else {}
