"""Converts conversations between OpenAI's format, which verifiers uses, and our own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tinker

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, ensure_text
from tinker_cookbook.renderers.core.messages import get_text_content, normalize_messages
from tinker_cookbook.third_party.openai_compat import openai_tools_to_tinker

_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")


def prompt_of(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tinker.ModelInput:
    """Returns the generation prompt of a conversation; ``tools`` are OpenAI's declarations."""
    normal = normalize_messages([_plain(message) for message in messages])
    if tools:
        system = ""
        if normal and normal[0]["role"] == "system":
            system, normal = ensure_text(normal[0]["content"]), normal[1:]
        specs = openai_tools_to_tinker([dict(tool) for tool in tools])
        try:
            prefix = renderer.create_conversation_prefix_with_tools(specs, system)
        except NotImplementedError as error:
            raise ConfigurationError(
                f"renderer_name: {type(renderer).__name__} has no form for tools, which this "
                f"environment declares ({', '.join(spec['name'] for spec in specs)}); choose a "
                "chat format that has one"
            ) from error
        normal = [*prefix, *normal]
    return renderer.build_generation_prompt(normal)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that renderers know, with the text of content parts joined."""
    plain = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    content = plain.setdefault("content", "")
    if isinstance(content, list):
        kinds = {part.get("type") for part in content} - {"text"}
        if kinds:
            raise ConfigurationError(
                f"messages: got parts of type {', '.join(map(str, kinds))}, expected text; the "
                "environment cannot be used with a model of text"
            )
        plain["content"] = "".join(part["text"] for part in content)
    return plain


def openai_fields(message: Message) -> dict[str, Any]:
    """Returns a parsed response as OpenAI's assistant message.

    Calls that cannot be parsed stay text, so that the environment sees what the model wrote.
    """
    unparsed = "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": get_text_content(message) + unparsed,
    }
    content = message["content"]
    if not isinstance(content, str):
        thinking = "".join(part["thinking"] for part in content if part["type"] == "thinking")
        if thinking:
            fields["reasoning_content"] = thinking
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for i, call in enumerate(calls)
        ]
    return fields
