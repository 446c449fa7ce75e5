"""Converts messages and tools between Inspect AI and the renderers.

Needs ``inspect-ai``: import it through ``inspect_bridge.model``, which reports the missing package.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    Content,
    ContentAudio,
    ContentImage,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall as InspectToolCall
from inspect_ai.tool import ToolInfo

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    AudioPart,
    ContentPart,
    ImagePart,
    Message,
    Renderer,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    ensure_text,
    get_text_content,
)

_RAW_TEXT = "raw_text"
"""Argument with the text of a call that could not be parsed."""
_NO_TOOL = "unparsed"
"""Function name of such a call."""


def convert_inspect_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Converts a conversation of Inspect to messages for the renderers.

    Text, reasoning, images, audio, tool calls and results of tools are kept. The content of a tool
    result that failed is its error, as in Inspect's own providers.

    Raises:
        RendererError: a part that no renderer supports, such as a video or a document.
    """
    return [_convert(message, i) for i, message in enumerate(messages)]


def _convert(message: ChatMessage, index: int) -> Message:
    content: str | list[ContentPart]
    if isinstance(message.content, str):
        content = message.content
    else:
        where = f"messages[{index}].content"
        content = [_convert_part(part, f"{where}[{i}]") for i, part in enumerate(message.content)]
    converted = Message(role=message.role, content=content)
    if isinstance(message, ChatMessageTool):
        if message.error is not None:
            converted["content"] = message.error.message
        if message.tool_call_id is not None:
            converted["tool_call_id"] = message.tool_call_id
        if message.function is not None:
            converted["name"] = message.function
    elif isinstance(message, ChatMessageAssistant):
        _add_calls(converted, message.tool_calls or [])
    return converted


def _convert_part(part: Content, where: str) -> ContentPart:
    if isinstance(part, ContentText):
        return TextPart(type="text", text=part.text)
    if isinstance(part, ContentReasoning):
        # The text of redacted reasoning is encrypted; its summary is the readable part.
        thinking = part.summary or "" if part.redacted else part.reasoning
        return ThinkingPart(type="thinking", thinking=thinking)
    if isinstance(part, ContentImage):
        return ImagePart(type="image", image=part.image)
    if isinstance(part, ContentAudio):
        return AudioPart(type="audio", audio=part.audio)
    raise RendererError(
        f"{where}: got a part of type {part.type!r}, expected text, reasoning, an image or audio: "
        "no chat format supports others"
    )


def _add_calls(message: Message, calls: Sequence[InspectToolCall]) -> None:
    parsed: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    for call in calls:
        raw_text = call.arguments.get(_RAW_TEXT)
        # Rendered verbatim, so that the next prompt extends the sampled tokens.
        if call.parse_error is not None and isinstance(raw_text, str):
            unparsed.append(UnparsedToolCall(raw_text=raw_text, error=call.parse_error))
            continue
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        body = ToolCall.FunctionBody(name=call.function, arguments=arguments)
        parsed.append(ToolCall(function=body, id=call.id))
    if parsed:
        message["tool_calls"] = parsed
    if unparsed:
        message["unparsed_tool_calls"] = unparsed


def with_tools(
    renderer: Renderer, messages: list[Message], tools: Sequence[ToolInfo]
) -> list[Message]:
    """Returns the conversation with the declaration of ``tools`` prepended.

    A system message at the beginning becomes part of the declaration, as in chat templates.
    Raises ``UnsupportedToolsError`` if the chat format does not support tools.
    """
    if not tools:
        return messages
    system = ""
    if messages and messages[0]["role"] == "system":
        system, messages = ensure_text(messages[0]["content"]), messages[1:]
    specs = [
        ToolSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters.model_dump(mode="json", exclude_none=True),
        )
        for tool in tools
    ]
    return [*renderer.create_conversation_prefix_with_tools(specs, system), *messages]


def assistant_message(
    message: Message, model: str, *, include_reasoning: bool, parallel_tool_calls: bool = True
) -> ChatMessageAssistant:
    """Returns a parsed response as a message of Inspect.

    A call that cannot be parsed becomes a call with ``parse_error``: Inspect reports the error
    to the model, which can then correct itself.

    Args:
        message: The response, from ``renderer.parse_response``.
        model: Name of the model.
        include_reasoning: Whether thinking is kept, as ``ContentReasoning``.
        parallel_tool_calls: Whether calls after the first one are kept.
    """
    content: str | list[Content] = get_text_content(message)
    if include_reasoning and not isinstance(message["content"], str):
        content = []
        for part in message["content"]:
            if part["type"] == "thinking":
                content.append(ContentReasoning(reasoning=part["thinking"]))
            elif part["type"] == "text":
                content.append(ContentText(text=part["text"]))
    calls = [_inspect_call(call) for call in message.get("tool_calls", [])]
    for failed in message.get("unparsed_tool_calls", []):
        arguments = {_RAW_TEXT: failed.raw_text}
        calls.append(InspectToolCall(_call_id(), _NO_TOOL, arguments, parse_error=failed.error))
    if not parallel_tool_calls:
        calls = calls[:1]
    return ChatMessageAssistant(
        content=content, tool_calls=calls or None, model=model, source="generate"
    )


def _inspect_call(call: ToolCall) -> InspectToolCall:
    name, text = call.function.name, call.function.arguments
    call_id = call.id or _call_id()
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return InspectToolCall(call_id, name, {_RAW_TEXT: text}, parse_error=str(error))
    if not isinstance(arguments, dict):
        problem = f"arguments: got {text}, expected a JSON object"
        return InspectToolCall(call_id, name, {_RAW_TEXT: text}, parse_error=problem)
    return InspectToolCall(call_id, name, arguments)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
