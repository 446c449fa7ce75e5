"""Messages and tool calls of an episode as JSON texts, for the record of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tinker_cookbook.run.jsonl import json_text_of


def conversation_of(env: Any) -> tuple[str, str]:
    """Returns the messages and the tool calls of an environment; "" for one that has none, and for
    messages without an answer, which are only a prompt."""
    # Environments of user code need not derive from Env.
    given = getattr(env, "messages", None)
    messages = plain_messages(given) if isinstance(given, list | tuple) else []
    if not any(message.get("role") == "assistant" for message in messages):
        messages = []
    calls = getattr(env, "called_tools", None)
    return _list_text(messages), _list_text(calls() if calls else ())


def messages_json(messages: Iterable[Any]) -> str:
    """Returns messages as a JSON list, "" for none."""
    return _list_text(plain_messages(messages))


def plain_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns messages as JSON values; an image or a sound keeps only its type."""
    return [_plain_message(message) for message in messages]


def _plain_message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dict(message)
    if isinstance(content := plain.get("content"), list | tuple):
        # The record has the images of the prompts by their digests, in the same order.
        plain["content"] = [
            part if part.get("type") in ("text", "thinking") else {"type": part.get("type")}
            for part in content
        ]
    for name in ("tool_calls", "unparsed_tool_calls"):
        if name in plain:
            plain[name] = [
                call if isinstance(call, Mapping) else call.model_dump(exclude_none=True)
                for call in plain[name]
            ]
    return plain


def _list_text(items: Iterable[Mapping[str, Any]]) -> str:
    return json_text_of(found) if (found := list(items)) else ""
