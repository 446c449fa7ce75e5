"""Converts messages, tools and log-probabilities between Inspect AI and the renderers.

Needs ``inspect-ai``: import it through ``inspect_bridge.model``, which reports the missing package.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    Content,
    ContentAudio,
    ContentImage,
    ContentReasoning,
    ContentText,
    Logprob,
    Logprobs,
    TopLogprob,
)
from inspect_ai.tool import ToolCall as InspectToolCall
from inspect_ai.tool import ToolChoice, ToolFunction, ToolInfo

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
    TrainOnWhat,
    UnparsedToolCall,
    ensure_text,
    get_text_content,
)
from tinker_cookbook.renderers.core.codec import TextCodec

if TYPE_CHECKING:
    import numpy as np

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


def tool_spec(tool: ToolInfo) -> ToolSpec:
    """Returns the declaration of a tool; ``parameters`` is its JSON schema."""
    parameters = tool.parameters.model_dump(mode="json", exclude_none=True)
    return ToolSpec(name=tool.name, description=tool.description, parameters=parameters)


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
    specs = [tool_spec(tool) for tool in tools]
    return [*renderer.create_conversation_prefix_with_tools(specs, system), *messages]


def forced_call_prefix(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolInfo],
    choice: ToolChoice,
) -> list[int]:
    """Returns the first tokens of a tool call, so that the model has to complete the call.

    With ``"any"`` and several tools, the model chooses the name.

    Raises:
        RendererError: the chat format does not begin a call with the same tokens after every
            prompt, or the named tool is not among ``tools``.
    """
    names = [tool.name for tool in tools]
    if isinstance(choice, ToolFunction):
        if choice.name not in names:
            raise RendererError(
                f"tool_choice: got {choice.name!r}, expected one of {', '.join(names) or 'no tool'}"
            )
        names = [choice.name]
    prompt = renderer.build_generation_prompt(messages).to_ints()
    # The common prefix of two different calls is what the format writes before the model's choice.
    if len(names) == 1:
        variants = [(names[0], "{}"), (names[0], '{"x": 1}')]
    else:
        variants = [(name, "{}") for name in ("a_tool", "other_tool")]
    begun = []
    for name, arguments in variants:
        body = ToolCall.FunctionBody(name=name, arguments=arguments)
        call = Message(role="assistant", content="", tool_calls=[ToolCall(function=body, id="0")])
        model_input, _ = renderer.build_supervised_example(
            [*messages, call], TrainOnWhat.LAST_ASSISTANT_MESSAGE
        )
        begun.append(model_input.to_ints())
    if any(tokens[: len(prompt)] != prompt for tokens in begun):
        raise RendererError(
            f"tool_choice: got {choice!r}, but the chat format {renderer.spec} has no fixed "
            "beginning of a tool call; use tool_choice='auto'"
        )
    pairs = zip(*(tokens[len(prompt) :] for tokens in begun), strict=False)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


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


def convert_logprobs(
    codec: TextCodec,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: tuple[np.ndarray, np.ndarray] | None,
) -> Logprobs:
    """Returns log-probabilities in Inspect's form.

    Args:
        codec: Decodes the tokens.
        tokens: Token ids [T].
        logprobs: Their log-probabilities [T], in nats.
        top: Ids and log-probabilities [T, k] of the most probable tokens, if there are any.
    """
    # Decode each token once: many positions share tokens, mostly among the top ones.
    spelled: dict[int, tuple[str, list[int] | None]] = {}

    def spell(token: int) -> tuple[str, list[int] | None]:
        if token not in spelled:
            text = codec.decode([token])
            # A token that is part of a character has no text.
            spelled[token] = (text, None if "\ufffd" in text else list(text.encode()))
        return spelled[token]

    content: list[Logprob] = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        alternatives: list[TopLogprob] | None = None
        if top is not None:
            pairs = zip(top[0][i].tolist(), top[1][i].tolist(), strict=True)
            alternatives = [
                TopLogprob(token=spell(other)[0], logprob=value, bytes=spell(other)[1])
                for other, value in pairs
            ]
        text, letters = spell(token)
        entry: dict[str, Any] = {"token": text, "logprob": float(logprob), "bytes": letters}
        content.append(Logprob(**entry, top_logprobs=alternatives))
    return Logprobs(content=content)
