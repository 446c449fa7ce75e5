"""Keeps names of control tokens in messages plain text, so that no message can forge a turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.codec import BORDER, TextCodec
from tinker_cookbook.renderers.core.messages import Message, TextPart, ToolCall

_PLAIN_FIELDS = ("name", "tool_call_id")


def split_control_tokens(
    message: Message, codec: TextCodec, idx: int, keep: frozenset[str] = frozenset()
) -> Message:
    """Returns the message with every name of a control token marked for ``codec``.

    Covers text, thinking, names and arguments of tool calls; names in ``keep`` stay tokens. The raw
    text of calls that could not be read is left as it is: the model sampled it, and it must render
    to the same tokens again. Returns ``message`` itself where it holds no such name. Raises
    RendererError for a role that holds one.
    """
    if name := codec.control_token_in(message["role"]):
        raise RendererError(
            f"messages[{idx}].role: got {message['role']!r}, which contains the control token "
            f"{name!r}; expected a plain role such as 'user' or 'assistant'"
        )
    changed: dict[str, Any] = {}
    content = message["content"]
    if isinstance(content, str):
        marked = codec.split_control_tokens(content, keep)
        if marked != content:
            changed["content"] = marked
    else:
        parts = _split_parts(content, codec, keep)
        if parts != content:
            changed["content"] = parts
    if calls := message.get("tool_calls"):
        marked_calls = [_split_call(call, codec) for call in calls]
        if marked_calls != calls:
            changed["tool_calls"] = marked_calls
    for field in _PLAIN_FIELDS:
        value = message.get(field)
        if isinstance(value, str) and (marked := codec.split_control_tokens(value)) != value:
            changed[field] = marked
    return Message(**{**message, **changed}) if changed else message


def part_texts_apart(message: Message) -> Message:
    """Returns the message with a ``BORDER`` between texts of neighbouring parts."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = content[:1]
    for before, part in pairwise(content):
        if before["type"] == "text" and part["type"] == "text":
            part = TextPart(type="text", text=BORDER + part["text"])
        parts.append(part)
    return Message(**{**message, "content": parts})


def _split_parts(content: list[Any], codec: TextCodec, keep: frozenset[str]) -> list[Any]:
    """Marks texts together and thoughts together: parts may be written without a gap."""
    marked: dict[str, Iterator[str]] = {}
    for kind in ("text", "thinking"):
        texts = [part[kind] for part in content if part["type"] == kind]
        marked[kind] = iter(codec.split_control_tokens_in(texts, keep))
    return [
        {**part, part["type"]: next(marked[part["type"]])} if part["type"] in marked else part
        for part in content
    ]


def _split_call(call: ToolCall, codec: TextCodec) -> ToolCall:
    name = codec.split_control_tokens(call.function.name)
    arguments = _split_arguments(call.function.arguments, codec)
    call_id = call.id and codec.split_control_tokens(call.id)
    if (name, arguments, call_id) == (call.function.name, call.function.arguments, call.id):
        return call
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments), id=call_id)


def _split_arguments(arguments: str, codec: TextCodec) -> str:
    marked = codec.split_control_tokens(arguments)
    if "\\" not in arguments:
        return marked
    # An escape such as \u003c may spell a name. Formats that write each argument decode it.
    try:
        decoded = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return marked
    plain = codec.split_control_tokens(decoded)
    return marked if plain == decoded else plain
