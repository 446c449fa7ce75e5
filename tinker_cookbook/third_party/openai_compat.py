"""Messages and tools of the OpenAI Chat Completions API as those of this package, and back."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict
from urllib.parse import urlsplit

from tinker_cookbook.audio_processing_utils import audio_part_to_input_audio
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.image_processing_utils import image_to_data_uri
from tinker_cookbook.renderers.base import ContentPart, Message, ToolSpec
from tinker_cookbook.renderers.core.message_keys import REASONING_KEYS
from tinker_cookbook.renderers.core.messages import normalize_messages, openai_message
from tinker_cookbook.renderers.core.tool_calls import TOOL_SHAPE, as_openai_tool, read_tool


class OpenAIChatInput(TypedDict):
    """``messages`` and ``tools`` of a request."""

    messages: list[dict[str, Any]]
    tools: NotRequired[list[dict[str, Any]]]


def openai_messages_to_tinker(messages: list[dict[str, Any]]) -> list[Message]:
    """Returns messages of a request or a response as messages of this package.

    ``reasoning_content`` becomes a first part of thinking, ``image_url`` and ``input_audio`` parts
    of images and audio, and ``content: null`` the empty text. Raises RendererError with the place
    for what a message here cannot have, such as reasoning of another role than assistant.
    """
    return normalize_messages([_message(m, f"messages[{i}]") for i, m in enumerate(messages)])


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in REASONING_KEYS:
        if (reasoning := message.get(key)) and message["role"] != "assistant":
            raise RendererError(
                f"{where}.{key}: got {reasoning!r:.80} on role {message['role']!r}, but reasoning "
                "is only valid on assistant messages"
            )
    content = message.get("content") or ""
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return {**message, "content": content}


def _part(part: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if part.get("type") != "input_audio":
        return part
    value: Any = part.get("input_audio")
    try:
        data = base64.b64decode(value["data"], validate=True)
        numbers = {name: value[name] for name in ("num_frames", "sample_rate") if name in value}
        return {"type": "audio", "audio": data, "format": value["format"].lower(), **numbers}
    except (AttributeError, KeyError, TypeError, binascii.Error) as error:
        raise RendererError(
            f'{where}.input_audio: got {value!r:.80}, expected {{"data": base64, "format": …}}'
        ) from error


def tinker_messages_to_openai(messages: Sequence[Message]) -> OpenAIChatInput:
    """Returns messages of this package as ``messages`` and ``tools`` of a request.

    Parts of thinking become one ``reasoning_content``, with a line break between them. Images and
    audio are sent within the request, but http(s) addresses of images stay. The messages with role
    ``tool_declare`` become ``tools``. ``trainable`` and ``unparsed_tool_calls`` have no form there
    and are left out. OpenAI itself takes neither calls without an id nor FLAC.

    Raises:
        RendererError: Thinking of another role than assistant, an unknown part, or a declaration
            of tools that is not in OpenAI's form.
    """
    tools: dict[str, dict[str, Any]] = {}
    converted: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if message["role"] != "tool_declare":
            converted.append(_openai(message, f"messages[{i}]"))
            continue
        for tool in _declared(message["content"], f"messages[{i}].content"):
            tools[tool["function"]["name"]] = tool
    result = OpenAIChatInput(messages=converted)
    if tools:
        result["tools"] = list(tools.values())
    return result


def _declared(content: Any, where: str) -> list[dict[str, Any]]:
    try:
        tools = json.loads(content)
        if all(isinstance(tool["function"]["name"], str) for tool in tools):
            return list(tools)
    except (TypeError, ValueError, KeyError):
        pass
    raise RendererError(
        f"{where}: got {content!r:.80}, expected a JSON list of OpenAI tools: {TOOL_SHAPE}"
    )


def _openai(message: Message, where: str) -> dict[str, Any]:
    content = message["content"]
    # Also checks the calls, which may be dictionaries.
    (plain,) = normalize_messages([{**message, "content": ""}])
    result = openai_message(plain)
    if isinstance(content, str):
        return result | {"content": content}
    thinking = [part["thinking"] for part in content if part["type"] == "thinking"]
    if thinking and message["role"] != "assistant":
        raise RendererError(
            f"{where}.content: got thinking on role {message['role']!r}, but it is only valid on "
            "assistant messages"
        )
    if thinking:
        result["reasoning_content"] = "\n".join(thinking)
    parts = [
        _openai_part(part, f"{where}.content[{i}]")
        for i, part in enumerate(content)
        if part["type"] != "thinking"
    ]
    if not parts:
        result["content"] = None if "tool_calls" in result else ""
    else:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        result["content"] = parts[0]["text"] if alone else parts
    return result


def _openai_part(part: ContentPart, where: str) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image":
        image = part["image"]
        is_url = isinstance(image, str) and urlsplit(image).scheme in ("http", "https", "data")
        url = image if is_url else image_to_data_uri(image)
        return {"type": "image_url", "image_url": {"url": url}}
    if part["type"] == "audio":
        return {"type": "input_audio", "input_audio": audio_part_to_input_audio(part)}
    raise RendererError(f"{where}: unsupported content part type {part['type']!r}")


def openai_tools_to_tinker(tools: list[dict[str, Any]]) -> list[ToolSpec]:
    """Returns the functions among the tools of a request; tools of other kinds are left out."""
    functions = [tool for tool in tools if tool.get("type") == "function"]
    return [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(functions)]


def tool_specs_to_openai_tools(tools: list[ToolSpec]) -> list[dict[str, Any]]:
    """Returns declarations of tools in the form of a request."""
    return [as_openai_tool(tool) for tool in tools]
