"""Validation and preparation of a conversation for Mistral's formats.

The rules of Mistral's library: the order of roles, one result for each call,
consecutive messages of one role joined, ids of nine letters or digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.arguments import arguments_text, read_json, to_json
from tinker_cookbook.renderers.core.checks import TEXT, check_caller, check_parts
from tinker_cookbook.renderers.core.messages import (
    Message,
    ToolCall,
    ToolSpec,
    checked_arguments,
    ensure_text,
)
from tinker_cookbook.renderers.core.tool_calls import tool_call

TOOLS_ROLE = "available_tools"
"""Role of the first message, which declares tools as JSON."""
_BETWEEN = "\n\n"  # between texts that become one message
# The roles that may follow each role; "" is the beginning.
_FOLLOWERS = {
    "": (TOOLS_ROLE, "system", "user", "assistant"),
    TOOLS_ROLE: ("system", "user", "assistant"),
    "system": ("user", "assistant", "system"),
    "user": ("assistant", "system", "user"),
    "assistant": ("assistant", "user", "tool"),
    "tool": ("assistant", "tool"),
}


def prepare(messages: Sequence[Message], renderer: str) -> list[Message]:
    """Returns the conversation with strings as content, joined messages, and ids of calls and
    results; raises RendererError where the format cannot express it."""
    _check_order(messages, renderer)
    joined: list[Message] = []
    for i, message in enumerate(messages):
        check_parts(message, i, renderer, TEXT)
        content = message["content"]
        # Only these roles join their parts by a blank line, as in Mistral's library.
        if message["role"] in ("system", "user") and not isinstance(content, str):
            text = _BETWEEN.join(part.get("text", "") for part in content)
        else:
            text = ensure_text(content)
        message = Message(**{**message, "content": text})
        before = joined[-1] if joined else None
        # Consecutive messages of a role are one, unless a call between them could not be parsed or
        # only one of them is trained on.
        if (
            before
            and before["role"] == message["role"]
            and message["role"] in ("user", "assistant")
            and not before.get("unparsed_tool_calls")
            and before.get("trainable") == message.get("trainable")
        ):
            joined[-1] = _join(before, message)
        else:
            joined.append(message)
    return _with_ids(joined)


def declare(tools: Sequence[ToolSpec]) -> Message:
    """Returns the message that declares ``tools``."""
    functions = [dict(tool.get("function", tool)) for tool in tools]
    # Keys are in the same order as in Mistral's library.
    declared = [
        {
            "type": "function",
            "function": {
                "name": function["name"],
                "description": function.get("description", ""),
                "parameters": function["parameters"],
            },
        }
        for function in functions
    ]
    return Message(role=TOOLS_ROLE, content=to_json(declared))


def calls_text(calls: Sequence[ToolCall], idx: int) -> str:
    """Returns the JSON list of ``calls``, with arguments dumped again."""
    written: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        where = f"messages[{idx}].tool_calls[{i}].function.arguments"
        arguments = read_json(checked_arguments(call.function.arguments, where))
        entry = {"name": call.function.name, "arguments": arguments}
        written.append(entry | ({"id": call.id} if call.id else {}))
    return to_json(written)


def read_calls(body: str) -> list[ToolCall]:
    """Returns the calls of a JSON list; raises ValueError for anything else."""
    entries = read_json(body)
    if not isinstance(entries, list) or not entries:
        raise ValueError("tool calls: expected a JSON list of calls")
    calls: list[ToolCall] = []
    for i, entry in enumerate(entries):
        keys = set(entry) - {"id"} if isinstance(entry, dict) else set[str]()
        if keys != {"name", "arguments"} or not isinstance(entry["name"], str):
            raise ValueError(f'tool call {i}: expected an object {{"name": …, "arguments": …}}')
        # A string is JSON already and stays as it was sampled.
        calls.append(tool_call(entry["name"], arguments_text(entry["arguments"]), entry.get("id")))
    return calls


def result_value(content: str) -> Any:
    """Returns the JSON value of a result, or its text if that is no JSON."""
    try:
        return read_json(content) if content else {}
    except ValueError:
        return content


def _check_order(messages: Sequence[Message], renderer: str) -> None:
    before = ""
    for i, message in enumerate(messages):
        role = message["role"]
        expected = _FOLLOWERS[before]
        if role not in expected:
            raise RendererError(
                f"messages[{i}].role: got {role!r} "
                f"{f'after {before!r}' if before else 'as the first message'}, expected one of "
                f"{', '.join(expected)}: {renderer} has no form for others; put the message "
                "elsewhere, or its text into a neighbour"
            )
        check_caller(message, i)
        before = role


def _join(first: Message, second: Message) -> Message:
    texts = [ensure_text(message["content"]) for message in (first, second)]
    # An answer with only calls must not add a blank line.
    if first["role"] == "assistant":
        texts = [text for text in texts if text]
    result = Message(**{**first, "content": _BETWEEN.join(texts)})
    if calls := [*first.get("tool_calls", []), *second.get("tool_calls", [])]:
        result["tool_calls"] = calls
    if unparsed := second.get("unparsed_tool_calls"):
        result["unparsed_tool_calls"] = unparsed
    return result


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """Sets an id of nine characters on every call and result: the given one, or the call's number.

    Raises RendererError for the result of an unknown call.
    """
    waiting: list[tuple[str | None, str]] = []  # calls without a result: given id, written id
    result: list[Message] = []
    count = 0
    for i, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        if calls:
            written: list[ToolCall] = []
            for call in calls:
                # A valid id is kept, so that a sampled call renders to its tokens.
                keeps = call.id and re.fullmatch("[a-zA-Z0-9]{9}", call.id)
                id_ = call.id if keeps and call.id else f"{count:09d}"
                written.append(ToolCall(function=call.function, id=id_))
                waiting.append((call.id, id_))
                count += 1
            message = Message(**{**message, "tool_calls": written})
        elif message["role"] == "tool":
            if not waiting:  # the result of an unparsed call, which has a number as well
                waiting.append((None, f"{count:09d}"))
                count += 1
            # By its id, or without one in the order of the calls.
            wanted = message.get("tool_call_id")
            found = (n for n, known in enumerate(waiting) if wanted and wanted in known)
            at = next(found, None)
            if wanted and at is None and waiting[0][0] is not None:
                known = ", ".join(repr(given or id_) for given, id_ in waiting)
                raise RendererError(
                    f"messages[{i}].tool_call_id: got {wanted!r}, expected the id of a call that "
                    f"has no result yet: {known}; leave it out to answer calls in their order"
                )
            message = Message(**{**message, "tool_call_id": waiting.pop(at or 0)[1]})
        result.append(message)
    return result
