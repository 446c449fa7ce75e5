"""Message types of a conversation, and functions that read, convert and validate them.

The shapes are those of the OpenAI chat format, so that a row of JSON is a conversation:
``{"role": "user", "content": "Hi"}``. Content is a string or a list of typed parts. Thinking is a
part of its own, because chat formats differ in how they write it and when they leave it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from tinker_cookbook.exceptions import RendererError, nearest

Role: TypeAlias = str


class TextPart(TypedDict):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ThinkingPart(TypedDict):
    """Reasoning that precedes an answer; chat formats wrap it in tags or drop it from history."""

    type: Literal["thinking"]
    thinking: str


class ImagePart(TypedDict):
    """An image: a PIL image, a URL, a data URI or a file path."""

    type: Literal["image"]
    image: Any


class AudioPart(TypedDict):
    """A piece of audio."""

    type: Literal["audio"]
    audio: Any


ContentPart: TypeAlias = TextPart | ThinkingPart | ImagePart | AudioPart
Content: TypeAlias = str | list[ContentPart]


class ToolSpec(TypedDict):
    """A tool the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


class StrictBase(BaseModel):
    """Immutable pydantic model that rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __str__(self) -> str:
        return repr(self)


class ToolCall(StrictBase):
    """One call of a tool by the assistant, in OpenAI's shape; ``arguments`` is a JSON string."""

    class FunctionBody(StrictBase):
        """Name of the function and its arguments as a JSON string."""

        name: str
        arguments: str

    function: FunctionBody
    id: str | None = None
    type: Literal["function"] = "function"


class UnparsedToolCall(StrictBase):
    """A tool call that cannot be read: its text, tags included, and what is wrong with it."""

    raw_text: str
    error: str


class Message(TypedDict):
    """One message of a conversation.

    ``trainable`` counts only under ``TrainOnWhat.CUSTOMIZED``; ``tool_call_id`` and ``name`` belong
    to role ``tool`` and are kept for the environment; only gpt_oss and Kimi K2 write them.
    """

    role: Role
    content: Content
    tool_calls: NotRequired[list[ToolCall]]
    unparsed_tool_calls: NotRequired[list[UnparsedToolCall]]
    trainable: NotRequired[bool]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


_PART_FIELDS = {"text": "text", "thinking": "thinking", "image": "image", "audio": "audio"}
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


def ensure_text(content: Content) -> str:
    """Returns text content as one string; raises RendererError for other parts."""
    if isinstance(content, str):
        return content
    others = sorted({part["type"] for part in content} - {"text"})
    if others:
        raise RendererError(
            f"content: got parts of type {', '.join(others)}, expected text only; "
            "use get_text_content(message) to take the text and leave the rest"
        )
    return "".join(part["text"] for part in content if part["type"] == "text")


def ensure_list(content: Content) -> list[ContentPart]:
    """Returns content as a list of parts; a string becomes one text part."""
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


def get_text_content(message: Message) -> str:
    """Returns the text of a message, without thinking and media."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def has_thinking(content: Content) -> bool:
    """Returns whether the content has a thinking part, or a string an opening ``<think>``."""
    if isinstance(content, str):
        return _THINK_OPEN in content
    return any(part["type"] == "thinking" for part in content)


def remove_thinking(parts: Content) -> Content:
    """Returns the content without its thinking parts; a string is returned as it is."""
    if isinstance(parts, str):
        return parts
    return [part for part in parts if part["type"] != "thinking"]


def format_content_as_string(content: Content, separator: str = "\n") -> str:
    """Returns the whole content as readable text: thinking in tags, images by URL or size."""
    if isinstance(content, str):
        return content
    return separator.join(_part_as_string(part) for part in content)


def _part_as_string(part: ContentPart) -> str:
    if part["type"] == "text":
        return part["text"]
    if part["type"] == "thinking":
        return f"{_THINK_OPEN}{part['thinking']}{_THINK_CLOSE}"
    if part["type"] == "image":
        image = part["image"]
        if isinstance(image, str):
            return f"<image>{image}</image>"
        width, height = image.size
        return f"<image>Image({width}x{height}, {image.mode})</image>"
    raise RendererError(
        f"Unknown content part type: {part['type']}, expected text, thinking or image"
    )


def parse_think_blocks(content: str) -> list[ContentPart] | None:
    """Splits text at ``<think>…</think>`` into thinking and text parts, white space untouched.

    Returns None without a ``<think>``. Empty parts are left out. A block that is never closed (the
    sample was cut off) is thinking to its end.
    """
    if _THINK_OPEN not in content:
        return None
    parts: list[ContentPart] = []
    rest = content
    while rest:
        text, opened, rest = rest.partition(_THINK_OPEN)
        if text:
            parts.append(TextPart(type="text", text=text))
        if not opened:
            break
        thinking, _, rest = rest.partition(_THINK_CLOSE)
        if thinking:
            parts.append(ThinkingPart(type="thinking", thinking=thinking))
    return parts


def content_to_jsonable(content: Content) -> Any:
    """Returns the content as JSON values; media that are not strings become a placeholder."""
    if isinstance(content, str):
        return content
    return [
        {
            field: value if isinstance(value, str) else f"<{type(value).__name__}>"
            for field, value in part.items()
        }
        for part in content
    ]


def message_to_jsonable(message: Message) -> dict[str, Any]:
    """Returns the message as JSON values (tool calls as dictionaries)."""
    plain = {key: value for key, value in message.items() if not key.endswith("tool_calls")}
    plain["content"] = content_to_jsonable(message["content"])
    if "tool_calls" in message:
        plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message["tool_calls"]]
    if "unparsed_tool_calls" in message:
        plain["unparsed_tool_calls"] = [
            call.model_dump() for call in message["unparsed_tool_calls"]
        ]
    return plain


def system_message(text: str) -> list[Message]:
    """Returns the system message that begins a conversation, none for no text."""
    return [Message(role="system", content=text)] if text else []


def map_text(message: Message, change: Callable[[str], str]) -> Message:
    """Returns the message with ``change`` applied to its text."""
    content = message["content"]
    if isinstance(content, str):
        text = change(content)
        return message if text is content else Message(**{**message, "content": text})
    parts = [
        TextPart(type="text", text=change(part["text"])) if part["type"] == "text" else part
        for part in content
    ]
    return Message(**{**message, "content": parts})


def openai_message(message: Message) -> dict[str, Any]:
    """Returns the message in the form of the OpenAI API and of chat templates.

    Content with images stays a list of parts; other content becomes text, with thinking as
    ``reasoning_content``.
    """
    content = message["content"]
    result: dict[str, Any] = {"role": message["role"], "content": get_text_content(message)}
    if not isinstance(content, str):
        if any(part["type"] in ("image", "audio") for part in content):
            result["content"] = [dict(part) for part in content if part["type"] != "thinking"]
        if has_thinking(content):
            thoughts = (part["thinking"] for part in content if part["type"] == "thinking")
            result["reasoning_content"] = "".join(thoughts)
    if "tool_calls" in message:
        result["tool_calls"] = [
            call.model_dump(exclude_none=True) for call in message["tool_calls"]
        ]
    kept = ("tool_call_id", "name")
    return result | {key: value for key, value in message.items() if key in kept}


class _NormalMessage(dict[str, Any]):
    """Message that ``normalize_messages`` has checked and does not check again."""


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Checks a conversation and returns it in the shape that renderers expect.

    JSON rows differ: ``content: null`` beside tool calls, tool calls as dictionaries with arguments
    as an object, thinking as ``reasoning_content``. A message is normalised once: a data reader may
    call this for its errors, and the renderer takes the result as it is.

    Raises:
        RendererError: Names the message and the field that is wrong.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RendererError(
            f"messages: got {type(messages).__name__}, expected a list of messages such as "
            '[{"role": "user", "content": "Hi"}]'
        )
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str) -> Message:
    if isinstance(message, _NormalMessage):
        return cast(Message, message)
    if not isinstance(message, Mapping):
        raise RendererError(
            f"{where}: got {type(message).__name__}, expected an object with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RendererError(
            f"{where}.role: got {role!r}, expected a role such as 'user' or 'assistant'"
        )
    result: dict[str, Any] = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    # OpenAI rows have content null beside calls.
    calls = result.get("tool_calls") or result.get("unparsed_tool_calls")
    if result.get("content") is None and calls:
        result["content"] = ""
    _check_content(result.get("content"), f"{where}.content")
    if result.get("tool_calls"):
        result["tool_calls"] = [
            _normalize_tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(result["tool_calls"])
        ]
    else:
        result.pop("tool_calls", None)
    if result.get("unparsed_tool_calls"):
        result["unparsed_tool_calls"] = [
            _normalize_unparsed(call, f"{where}.unparsed_tool_calls[{i}]")
            for i, call in enumerate(result["unparsed_tool_calls"])
        ]
    # Thinking in a separate field becomes the first part of the content.
    reasoning = result.pop("reasoning_content", None)
    if reasoning:
        thinking = ThinkingPart(type="thinking", thinking=reasoning)
        text = [part for part in ensure_list(result["content"]) if part.get("text") != ""]
        result["content"] = [thinking, *text]
    return cast(Message, _NormalMessage(result))


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RendererError(f"{where}: got {content!r}, expected a string or a list of parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _PART_FIELDS:
            raise RendererError(
                f"{where}[{i}].type: got {kind!r}, expected one of {', '.join(_PART_FIELDS)}"
                f"{nearest(str(kind), _PART_FIELDS)}"
            )
        field = _PART_FIELDS[kind]
        value = part.get(field)
        if value is None or (kind in ("text", "thinking") and not isinstance(value, str)):
            raise RendererError(f"{where}[{i}].{field}: got {value!r}, expected a {kind}")


def _normalize_tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    try:
        function = dict(call["function"])
        # Hugging Face rows often have arguments as an object.
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        return ToolCall(function=ToolCall.FunctionBody.model_validate(function), id=call.get("id"))
    except (AttributeError, KeyError, TypeError, ValueError, ValidationError) as error:
        raise RendererError(
            f'{where}: got {call!r}, expected {{"function": {{"name": …, "arguments": …}}}}'
        ) from error


def _normalize_unparsed(call: Any, where: str) -> UnparsedToolCall:
    if isinstance(call, UnparsedToolCall):
        return call
    try:
        return UnparsedToolCall.model_validate(call)
    except ValidationError as error:
        raise RendererError(
            f'{where}: got {call!r}, expected {{"raw_text": …, "error": …}}'
        ) from error
