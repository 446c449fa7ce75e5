"""Converts conversations between OpenAI's format, which verifiers uses, and our own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tinker

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, ensure_text
from tinker_cookbook.renderers.core.messages import normalize_messages, openai_message
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
        plain["content"] = "".join(part["text"] for part in content)
    return plain


def openai_fields(message: Message) -> dict[str, Any]:
    """Returns a parsed response as OpenAI's assistant message.

    Calls that cannot be parsed stay text, so that the environment sees what the model wrote.
    """
    fields = openai_message(message)
    fields["content"] += "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))
    for i, call in enumerate(fields.get("tool_calls", ())):
        call.setdefault("id", f"call_{i}")
    return fields
