"""Harmony messages, the format of gpt-oss: parsing, writing, and the declaration of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.arguments import arguments_text, to_json
from tinker_cookbook.renderers.core.messages import (
    Message,
    ToolSpec,
    checked_arguments,
    ensure_list,
)
from tinker_cookbook.renderers.core.parsing import (
    ContentDelta,
    MessageReader,
    partial_at_end,
    unread,
    unterminated,
)
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool, tool_call

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ASSISTANT = f"{START}assistant"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."

# The recipient follows the role, as in the chat template, or the channel, as models often write it;
# the content type may have <|constrain|>.
_HEADER = re.compile(
    r"(?P<start><\|start\|>assistant)?(?: to=(?P<by_role>[^\s<]+))?"
    r"<\|channel\|>(?P<channel>\w+)(?: to=(?P<by_channel>[^\s<]+))?"
    r"(?:(?: ?<\|constrain\|>| )[\w.+/-]+)?\s*"
)
_CALL_BEGUN = re.compile(r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=[^\s<]")
_PARTS = {"analysis": "thinking", "final": "text", "commentary": "text"}


def recipient(raw_call: str) -> str | None:
    """Returns the recipient of an unparsed call, None if it has none."""
    found = re.search(r" to=([^\s<]+)", raw_call.partition(MESSAGE)[0])
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
        self._channel = ""  # of the message

    def feed(self, text: str) -> list[ContentDelta]:
        """Parses more text; headers, calls and what may begin ``<|end|>`` are buffered."""
        self._buffer += text
        self.is_complete = self.is_complete and not self._buffer
        deltas: list[ContentDelta] = []
        while self._state != "call":
            before = self._state, len(self._buffer)
            deltas += self._read_header() if self._state == "header" else self._read_body()
            # Nothing was consumed, so the rest needs more text.
            if (self._state, len(self._buffer)) == before:
                break
        return deltas

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer; a header without its end is text, or a call that was cut off."""
        rest, self._buffer = self._buffer, ""
        if self._state == "call":
            # Models leave out "functions." now and then.
            name = (recipient(self._header) or "").removeprefix(FUNCTIONS)
            try:
                if not name:
                    raise ValueError(f"tool call: expected a recipient {FUNCTIONS}NAME")
                # Arguments stay verbatim, so that the call renders to the sampled tokens.
                self.calls.append(tool_call(name, arguments_text(rest)))
            except ValueError as error:
                self.unparsed.append(unread(self._header + rest, error))
            return []
        if self._state == "header" and _CALL_BEGUN.match(rest):
            # Rendering adds <|start|>assistant again.
            self.unparsed.append(unterminated(rest.removeprefix(ASSISTANT), " to=", CALL))
            return []
        return self.add_thinking(rest) if self._state == "thinking" else self.add_text(rest)

    def _read_header(self) -> list[ContentDelta]:
        longest = 512 + len(MESSAGE)  # characters; longer text has no header
        at, end = self._buffer[:longest].find(MESSAGE), self._buffer[:longest].find(END)
        # Without a header the message is text, once it is too long for a header or has ended.
        if at < 0 or 0 <= end < at:
            if end >= 0 or len(self._buffer) >= longest:
                self._state = "text"
            return []
        header = self._buffer[:at]
        match = _HEADER.fullmatch(header)
        # A second message has to begin with <|start|>assistant.
        if match is None or not (self._first or match["start"]):
            self._state = "text"
            return []
        if match["by_role"] or match["by_channel"]:
            self._state, self._header = "call", header.removeprefix(ASSISTANT) + MESSAGE
        else:
            self._channel = match["channel"]
            self._state = _PARTS.get(self._channel, "text")
            # The header of an unknown channel is part of the text.
            if match["channel"] not in _PARTS:
                return []
        self._buffer = self._buffer[at + len(MESSAGE) :]
        return []

    def _read_body(self) -> list[ContentDelta]:
        add = self.add_thinking if self._state == "thinking" else self.add_text
        at = self._buffer.find(END)
        if at < 0:
            # What may begin <|end|> waits for the next text.
            ready = len(self._buffer) - partial_at_end(self._buffer, (END,))
            text, self._buffer = self._buffer[:ready], self._buffer[ready:]
            return add(text)
        text, self._buffer = self._buffer[:at], self._buffer[at + len(END) :]
        # Only an answer ends here: after thinking or a preamble another message follows.
        self.is_complete = self._state == "text" and self._channel == "final"
        self._state, self._first = "header", False
        return add(text)


def calls_tool(message: Message) -> bool:
    """Returns whether the message calls a tool, also in an unparsed call."""
    return bool(message.get("tool_calls") or message.get("unparsed_tool_calls"))


def is_answer(message: Message) -> bool:
    """Returns whether the message ends a turn of the assistant."""
    return message["role"] == "assistant" and not calls_tool(message)


def name_results(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with the full name of the called tool on every tool result.

    A result belongs to the call with its ``tool_call_id``, else to one with its name, else to the
    first call of the last assistant message that has no result yet. A result after all others has
    the tool of the result before it; without a call before it, it keeps its name.
    """
    named: list[Message] = []
    waiting: list[tuple[str | None, str]] = []  # calls without a result: id, recipient
    author: str | None = None
    for message in messages:
        if message["role"] == "assistant":
            waiting, author = _called(message), None
        elif message["role"] == "tool":
            call_id, name = message.get("tool_call_id"), message.get("name", "")
            name = name and FUNCTIONS + name.removeprefix(FUNCTIONS)
            if waiting:
                # Of equal calls, min returns the first.
                best = min(waiting, key=lambda c: (not call_id or c[0] != call_id, c[1] != name))
                waiting.remove(best)
                author = best[1]
            if author or name:
                message = Message(**{**message, "name": author or name})
        named.append(message)
    return named


def _called(message: Message) -> list[tuple[str | None, str]]:
    """Returns id and recipient of each call of the message."""
    calls = [(call.id, FUNCTIONS + call.function.name) for call in message.get("tool_calls", [])]
    unparsed = (recipient(call.raw_text) for call in message.get("unparsed_tool_calls", []))
    return [*calls, *((None, to) for to in unparsed if to)]


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


def write_call(message: Message, idx: int, *, thinks: bool, as_template: bool) -> str:
    """Returns what follows ``<|start|>assistant`` in a message with calls.

    ``as_template`` omits ``<|constrain|>`` and allows one call. Raises RendererError for further
    calls, and for arguments that are no JSON object.
    """
    # Empty parts have no message.
    runs = [(kind, text) for kind, text in _runs(message) if text]
    # History drops the thinking and keeps the text next to a call.
    parts = [_part(kind, text) for kind, text in runs if thinks or kind == "text"]
    unparsed = [call.raw_text for call in message.get("unparsed_tool_calls", [])]
    count = len(message.get("tool_calls", [])) + len(unparsed)
    if as_template and count != 1:
        raise RendererError(
            f"messages[{idx}].tool_calls: got {count} calls, expected one: "
            "the chat template of gpt-oss writes one call a message; split the message, each part "
            "followed by the result of its call, or leave out tool_format=template"
        )
    calls: list[str] = []
    for i, call in enumerate(message.get("tool_calls", [])):
        where = f"messages[{idx}].tool_calls[{i}].function.arguments"
        name, arguments = call.function.name, checked_arguments(call.function.arguments, where)
        kind = "json" if as_template else "<|constrain|>json"
        calls.append(f" to={FUNCTIONS}{name}{CHANNEL}commentary {kind}{MESSAGE}{arguments}")
    return ASSISTANT.join([*parts, *(call + CALL for call in [*calls, *unparsed])])


def _runs(message: Message) -> list[tuple[str, str]]:
    """Returns the content as alternating runs of ``thinking`` and ``text``."""
    content = ensure_list(message["content"])
    parts = [(part["type"], str(part.get("text", part.get("thinking", "")))) for part in content]
    grouped = groupby(parts, key=lambda part: part[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in grouped]


def _part(kind: str, text: str) -> str:
    channel = "analysis" if kind == "thinking" else "commentary"
    return f"{CHANNEL}{channel}{MESSAGE}{text}{END}"


NAMESPACE_OPEN = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
NAMESPACE_CLOSE = "} // namespace functions"
_PLAIN_TYPES = {"number": "number", "integer": "number", "boolean": "boolean"}


def declare_functions(tools: Sequence[ToolSpec]) -> str:
    """Returns the section of the developer message that declares ``tools`` as TypeScript types."""
    declared = ""
    for tool in tools:
        function = as_openai_tool(tool)["function"]
        parameters = function.get("parameters") or {}
        declared += f"// {function.get('description') or ''}\ntype {function['name']} = "
        fields = ""
        for name, schema in (parameters.get("properties") or {}).items():
            spec = _schema(schema)
            default = ""
            if "default" in spec:
                # Quirk of the template: a default of an enumeration or a union is not JSON.
                raw = spec.get("enum") or spec.get("oneOf")
                value = spec["default"] if raw else to_json(spec["default"])
                comma = "" if spec.get("oneOf") and not spec.get("enum") else ", "
                default = f"{comma}// default: {value}"
            if spec.get("description"):
                fields += f"// {spec['description']}\n"
            fields += f"{_key(name, parameters)}: {_type(spec)}{default},\n"
        declared += f"(_: {{\n{fields}}}) => any;\n\n" if fields else "() => any;\n\n"
    return f"{NAMESPACE_OPEN}{declared}{NAMESPACE_CLOSE}"


def _schema(schema: Any) -> Mapping[str, Any]:
    """Returns a schema as an object; true and false have no type."""
    return schema if isinstance(schema, Mapping) else {}


def _key(name: str, schema: Mapping[str, Any]) -> str:
    return name if name in (schema.get("required") or []) else f"{name}?"


def _type(schema: Any) -> str:
    """Returns the TypeScript type of a JSON schema, as the chat template writes it."""
    spec = _schema(schema)
    kind = spec.get("type")
    # The template marks null for arrays and strings only.
    nullable = " | null" if spec.get("nullable") else ""
    if kind == "array":
        items = spec.get("items")
        inner = _schema(items).get("type")
        if inner == "string":  # of an enumeration too
            return f"string[]{nullable}"
        if not (isinstance(inner, str) and inner in _PLAIN_TYPES):
            # The template gives up on long types.
            inner = _type(items) if items else "any"
            inner = "any" if inner == "object | object" or len(inner) > 50 else inner
        return f"{_PLAIN_TYPES.get(inner, inner)}[]{nullable}"
    if isinstance(kind, Sequence) and not isinstance(kind, str) and kind:
        return " | ".join(map(str, kind))
    if spec.get("oneOf"):
        variants: list[str] = []
        for variant in map(_schema, spec["oneOf"]):
            about = f"// {variant['description']}" if variant.get("description") else ""
            if "default" in variant:
                about += f"{' ' * 20}// default: {to_json(variant['default'])}"
            variants.append(_type(variant) + about)
        return " | \n".join(variants)
    if kind == "string" and spec.get("enum"):
        return '"' + '" | "'.join(map(str, spec["enum"])) + '"'
    if kind == "string":
        return f"string{nullable}"
    if kind == "object" and spec.get("properties"):
        fields = (
            f"{_key(name, spec)}: \n{' ' * 16}{_type(field)}"
            for name, field in spec["properties"].items()
        )
        return f"{{\n{', '.join(fields)}}}"
    return "object" if kind == "object" else _PLAIN_TYPES.get(str(kind), "any")
