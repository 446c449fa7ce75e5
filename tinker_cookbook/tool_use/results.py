"""Results of tools: construction, and the checks that keep a faulty tool from ending a run."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic import BaseModel

from tinker_cookbook.renderers import ContentPart, Message
from tinker_cookbook.tool_use.types import ToolResult

ERROR_TYPES = (
    "tool_not_found",
    "json_decode_failed",
    "validation_failed",
    "execution_failed",
    "timed_out",
    "unavailable",
)
"""Values of ``ToolResult.error_type``: unknown tool; arguments that are not JSON or do not match
the schema; the tool raised an error or returned something other than text; it timed out; something
that the tool depends on (a server, a sandbox) cannot be reached."""


def simple_tool_result(
    content: str | list[ContentPart],
    *,
    call_id: str = "",
    name: str = "",
    should_stop: bool = False,
    metrics: dict[str, float] | None = None,
    metadata: dict[str, Any] | None = None,
) -> ToolResult:
    """Returns a result of one message of role ``tool``.

    Args:
        content: Text, or parts for renderers that accept images in tool messages.
        call_id: ``ToolInput.call_id``; a ``FunctionTool`` fills it in.
        name: Name of the tool; a ``FunctionTool`` fills it in.
        should_stop: Whether the episode ends after this call.
        metrics: See ``ToolResult.metrics``.
        metadata: See ``ToolResult.metadata``.
    """
    message = Message(role="tool", content=content, tool_call_id=call_id, name=name)
    return ToolResult([message], should_stop, dict(metrics or {}), dict(metadata or {}))


def error_tool_result(
    error_msg: str,
    *,
    call_id: str = "",
    name: str = "",
    error_type: str = "execution_error",
    should_stop: bool = False,
) -> ToolResult:
    """Returns a result whose text is ``{"error": error_msg}``; ``error_type`` is for metrics."""
    return simple_tool_result(
        json.dumps({"error": error_msg}, ensure_ascii=False),
        call_id=call_id,
        name=name,
        should_stop=should_stop,
        metadata={"error": error_type},
    )


def as_tool_result(value: Any, name: str) -> ToolResult:
    """Converts a tool's return value to a result: text as it is, other values as JSON text.

    Raises:
        TypeError: The value is neither a ``ToolResult`` nor a JSON value (which may contain
            pydantic models), or a message of the result has no text.
    """
    if isinstance(value, ToolResult):
        result = ToolResult(
            [_checked_message(message, name) for message in value.messages],
            bool(value.should_stop),
            dict(value.metrics),
            dict(value.metadata),
        )
        for metric, number in result.metrics.items():
            if not isinstance(number, (int, float)):
                raise TypeError(f"tool '{name}': metric {metric!r} is {number!r}, not a number")
        return result
    if isinstance(value, str):
        return simple_tool_result(value)
    try:
        return simple_tool_result(json.dumps(value, ensure_ascii=False, default=_model_values))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"tool '{name}' must return text, a JSON value, a pydantic model or a ToolResult, got "
            f"{type(value).__name__} ({error})"
        ) from error


def _model_values(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _checked_message(message: Any, name: str) -> Message:
    content = message.get("content") if isinstance(message, dict) else None
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if isinstance(content, str) or parts:
        return cast(Message, dict(message))  # a copy, because it is completed and shortened later
    raise TypeError(
        f"tool '{name}' returned a message whose content is {type(content).__name__}, expected "
        "text or a list of parts"
    )


def completed(result: ToolResult, name: str, call_id: str | None, max_chars: int | None) -> None:
    """Fills in the name and id of the call, and shortens long texts, in place."""
    for message in result.messages:
        if call_id and not message.get("tool_call_id"):
            message["tool_call_id"] = call_id
        if not message.get("name"):
            message["name"] = name
        content = message["content"]
        if isinstance(content, str):
            message["content"] = _readable(content, max_chars)
        else:
            message["content"] = [
                {**part, "text": _readable(part["text"], max_chars)}  # type: ignore[misc]
                if part["type"] == "text"
                else part
                for part in content
            ]


def _readable(text: str, max_chars: int | None) -> str:
    """Returns the text without lone surrogates, and without its middle part if it is too long."""
    if max_chars is not None and len(text) > max_chars:
        # Keep both ends: the output of a program has its error at the end.
        head, tail = text[: max_chars - max_chars // 3], text[len(text) - max_chars // 3 :]
        left_out = len(text) - len(head) - len(tail)
        text = f"{head}\n[... {left_out} characters left out ...]\n{tail}"
    # Reading a binary file as text may leave lone surrogates, which no tokenizer can encode.
    return text.encode("utf-8", "replace").decode("utf-8")
