"""Message types of a conversation, and functions that read, convert and validate them.

The shapes are those of the OpenAI chat format, so that a row of JSON is a conversation:
``{"role": "user", "content": "Hi"}``. Content is a string or a list of typed parts. Thinking is a
separate part, because chat formats differ in how they write it and when they leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, cast

from pydantic import BaseModel, ConfigDict

from tinker_cookbook.exceptions import RendererError, nearest
from tinker_cookbook.renderers.core.arguments import arguments_text
from tinker_cookbook.renderers.core.image_parts import image_label, read_image_part
from tinker_cookbook.renderers.core.message_keys import KNOWN_KEYS, check_keys, take_reasoning

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
    """An image: a Pillow image, the bytes of a file, a data URI or a file path.

    Messages of data may write it as OpenAI's ``image_url``, as base64, or as ``{"bytes", "path"}``.
    """

    type: Literal["image"]
    image: Any


class AudioPart(TypedDict):
    """A piece of audio: the bytes of a file, a data URI or a file path.

    ``format`` is needed for bytes that are no WAV file, and the number of frames and their rate
    in Hz for all other files than WAV.
    """

    type: Literal["audio"]
    audio: Any
    format: NotRequired[Literal["wav", "mp3", "flac"]]
    num_frames: NotRequired[int]
    sample_rate: NotRequired[int]


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

    ``trainable: true`` is read only under ``TrainOnWhat.CUSTOMIZED``; false excludes a message
    from training in all modes but ALL_TOKENS. ``tool_call_id`` and ``name`` belong to role
    ``tool``, and only gpt_oss, Kimi K2 and Mistral write them.
    """

    role: Role
    content: Content
    tool_calls: NotRequired[list[ToolCall]]
    unparsed_tool_calls: NotRequired[list[UnparsedToolCall]]
    trainable: NotRequired[bool]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


_PART_TYPES = ("text", "thinking", "image", "audio")  # each is also the name of the part's field
_TEXT_FIELDS = ("role", "content", "tool_calls", "unparsed_tool_calls", "tool_call_id", "name")
THINK, END_THINK = "<think>", "</think>"


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
        return THINK in content
    return any(part["type"] == "thinking" for part in content)


def remove_thinking(parts: Content) -> Content:
    """Returns the content without its thinking parts; a string is returned as it is."""
    if isinstance(parts, str):
        return parts
    return [part for part in parts if part["type"] != "thinking"]


def format_content_as_string(content: Content, separator: str = "\n") -> str:
    """Returns the whole content as readable text: thinking in tags, images by path or size."""
    if isinstance(content, str):
        return content
    written: list[str] = []
    for part in content:
        if part["type"] == "text":
            written.append(part["text"])
        elif part["type"] == "thinking":
            written.append(f"{THINK}{part['thinking']}{END_THINK}")
        elif part["type"] == "image":
            written.append(f"<image>{image_label(part['image'])}</image>")
        else:
            raise RendererError(
                f"Unknown content part type: {part['type']}, expected text, thinking or image"
            )
    return separator.join(written)


def content_to_jsonable(content: Content) -> Any:
    """Returns the content as JSON values; media that are not strings become a placeholder."""
    if isinstance(content, str):
        return content
    return [
        {k: v if isinstance(v, str) else f"<{type(v).__name__}>" for k, v in part.items()}
        for part in content
    ]


def message_to_jsonable(message: Message) -> dict[str, Any]:
    """Returns the message as JSON values (tool calls as dictionaries)."""
    plain: dict[str, Any] = {**message, "content": content_to_jsonable(message["content"])}
    for field in ("tool_calls", "unparsed_tool_calls"):
        if field in message:
            plain[field] = [call.model_dump(exclude_none=True) for call in plain[field]]
    return plain


def system_message(text: str) -> list[Message]:
    """Returns the system message that begins a conversation, none for no text."""
    return [Message(role="system", content=text)] if text else []


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
        result["tool_calls"] = [c.model_dump(exclude_none=True) for c in message["tool_calls"]]
    return result | {k: v for k, v in message.items() if k in ("tool_call_id", "name")}


class _NormalMessage(dict[str, Any]):
    """Message that ``normalize_messages`` has checked and does not check again."""


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Checks a conversation and returns it in the shape that renderers expect.

    JSON rows differ: ``content: null`` next to tool calls, tool calls as dictionaries with
    arguments as an object, thinking in a key of its own (``message_keys``). A message is normalised
    once: a data reader may call this for its errors, and the renderer does not check the result
    again. Raises RendererError with the message and the field that is wrong.
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
    if not message.keys() <= KNOWN_KEYS:
        check_keys(message, where)
    # OpenAI rows have content null next to calls.
    calls = result.get("tool_calls") or result.get("unparsed_tool_calls")
    if result.get("content") is None and calls:
        result["content"] = ""
    result["content"] = _read_content(result.get("content"), f"{where}.content")
    for field, kind in (("tool_calls", ToolCall), ("unparsed_tool_calls", UnparsedToolCall)):
        # An empty list means the same as no list.
        if calls := result.pop(field, None):
            result[field] = [
                _normalize_call(call, kind, f"{where}.{field}[{i}]") for i, call in enumerate(calls)
            ]
    # Thinking in a separate field becomes the first part of the content.
    if reasoning := take_reasoning(result, where):
        if _begins_with_thinking(result["content"]):
            raise RendererError(
                f"{where}.content: got thinking in the content and in a key of its own, expected "
                "one of them"
            )
        thinking = ThinkingPart(type="thinking", thinking=reasoning)
        text = [part for part in ensure_list(result["content"]) if part.get("text") != ""]
        result["content"] = [thinking, *text]
    for field in _TEXT_FIELDS:
        _check_encodable(result.get(field), f"{where}.{field}")
    return cast(Message, _NormalMessage(result))


def _begins_with_thinking(content: Content) -> bool:
    if not isinstance(content, str):
        return has_thinking(content)
    # A text may mention one of the tags.
    return content.lstrip().startswith(THINK) and END_THINK in content


def _check_encodable(value: Any, where: str) -> None:
    """Raises RendererError for a lone surrogate in the text of ``value``."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RendererError(
                f"{where}: got half of a character (the lone surrogate {value[error.start]!r}), "
                "which no tokenizer can encode, expected text; replace it with "
                "text.encode('utf-8', 'replace').decode()"
            ) from error
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_encodable(item, f"{where}[{i}]")
    elif isinstance(value, (Mapping, BaseModel)):
        for key, item in dict(value).items():
            _check_encodable(item, f"{where}.{key}")


def _read_content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RendererError(f"{where}: got {content!r}, expected a string or a list of parts")
    parts: list[Any] = [read_image_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _PART_TYPES:
            raise RendererError(
                f"{where}[{i}].type: got {kind!r}, expected one of {', '.join(_PART_TYPES)}"
                f"{nearest(str(kind), _PART_TYPES)}"
            )
        value = part.get(kind)
        if value is None or (kind in ("text", "thinking") and not isinstance(value, str)):
            raise RendererError(f"{where}[{i}].{kind}: got {value!r}, expected a {kind}")
    return parts


def checked_arguments(arguments: Any, where: str) -> str:
    """Returns the arguments of a call as JSON text; raises RendererError unless they are an object
    or its text. An empty text and null mean no arguments."""
    try:
        return arguments_text(arguments)
    except (TypeError, ValueError, RecursionError) as error:
        raise RendererError(
            f"{where}: got {arguments!r}, expected a JSON object, or the JSON text of one; use "
            f'"{{}}" for no arguments ({error})'
        ) from error


def _normalize_call(call: Any, kind: type[StrictBase], where: str) -> StrictBase:
    if isinstance(call, ToolCall) and kind is ToolCall:
        written = call.function.arguments
        arguments = checked_arguments(written, f"{where}.function.arguments")
        if arguments is written:
            return call
        function = call.function.model_copy(update={"arguments": arguments})
        return call.model_copy(update={"function": function})
    if isinstance(call, kind):
        return call
    plain = cast("Mapping[str, Any]", call)
    try:
        if kind is UnparsedToolCall:
            return UnparsedToolCall.model_validate(call)
        function = dict(plain["function"])
        # Hugging Face rows often have arguments as an object.
        arguments = function.get("arguments")
        function["arguments"] = checked_arguments(arguments, f"{where}.function.arguments")
        return ToolCall(function=ToolCall.FunctionBody.model_validate(function), id=plain.get("id"))
    except RendererError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # also pydantic's
        fields = '{"function": {"name": …, "arguments": …}}'
        if kind is UnparsedToolCall:
            fields = '{"raw_text": …, "error": …}'
        raise RendererError(f"{where}: got {call!r}, expected {fields}") from error
