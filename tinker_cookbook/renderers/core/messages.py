"""Message types of a conversation.

The shapes are those of the OpenAI chat format, so that a row of JSON is a conversation as it is:
``{"role": "user", "content": "Hi"}``. Content is a string or a list of typed parts; thinking is a
part of its own, because chat formats disagree on how to write it and when to leave it out.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict

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
