"""The conversation that is shown where no file is given: as rich as the chat format takes it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.content import normalize_messages
from tinker_cookbook.renderers.core.messages import Message, ToolSpec
from tinker_cookbook.renderers.core.train_on_what import TrainOnWhat

TOOLS = (
    ToolSpec(
        name="get_weather",
        description="The weather of a city, today.",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    ),
)
_SYSTEM = "You are brief."
_PARTS = ("thinking", "tools", "a system message")


@dataclass(frozen=True)
class Conversation:
    """What is shown, and the same for the model's own chat template."""

    messages: list[Message]
    source: str
    """Where it came from, for people."""
    for_template: list[Message] | None = None
    """The messages without the declaration of tools, which the template writes itself."""
    tools: tuple[ToolSpec, ...] = ()


def sample_conversation(renderer: Renderer, train_on_what: TrainOnWhat) -> Conversation:
    """Returns a conversation with thinking, tools and a system message, or with fewer of them.

    A part is left out where the renderer refuses it, and ``source`` says why. Raises RendererError
    where it refuses a plain question and answer too.
    """
    for left_out in _by_number_left_out():
        parts: set[str] = {part for part in _PARTS if part not in left_out}
        try:
            found = _sample(renderer, parts)
        except RendererError:
            if len(left_out) == len(_PARTS):
                raise
            continue
        reasons = "".join(
            f"\nwithout {part}: {_refusal(renderer, parts | {part})}" for part in left_out
        )
        last = {**found.messages[-1], "trainable": True}
        if train_on_what is TrainOnWhat.CUSTOMIZED:
            found.messages[-1] = normalize_messages([last])[0]
        return Conversation(
            found.messages, f"the built-in example{reasons}", found.for_template, found.tools
        )
    raise AssertionError("the last sample is returned or raised")


def _by_number_left_out() -> list[tuple[str, ...]]:
    return [left for n in range(len(_PARTS) + 1) for left in itertools.combinations(_PARTS, n)]


def _refusal(renderer: Renderer, parts: set[str]) -> str:
    try:
        _sample(renderer, parts)
    except RendererError as error:
        return str(error)
    return "this renderer takes it, but not beside what else was left out"


def _sample(renderer: Renderer, parts: set[str]) -> Conversation:
    """The conversation with these parts; RendererError where an answer of it cannot be written."""
    tools = TOOLS if "tools" in parts else ()
    system = _SYSTEM if "a system message" in parts else ""
    begin: list[Any] = [{"role": "system", "content": system}] if system else []
    declared = renderer.create_conversation_prefix_with_tools(tools, system) if tools else begin
    dialogue = _dialogue("thinking" in parts, bool(tools))
    messages = normalize_messages([*declared, *dialogue])
    for end in range(1, len(messages) + 1):
        # Some formats refuse in the last answer what they drop from history.
        renderer.build_merged_examples(messages[:end], TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    return Conversation(messages, "", normalize_messages([*begin, *dialogue]), tools)


def _dialogue(thinking: bool, tools: bool) -> list[Mapping[str, Any]]:
    def answer(text: str, thought: str, **more: Any) -> Mapping[str, Any]:
        content = [{"type": "text", "text": text}] if text else []
        if thinking:
            return {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": thought}, *content],
                **more,
            }
        return {"role": "assistant", "content": text, **more}

    call = {"function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    looked_up = [
        answer("", "I have to look it up.", tool_calls=[call]),
        {"role": "tool", "content": "4 °C, snow 🌨️"},
    ]
    return [
        {"role": "user", "content": "Do I need a coat in Zürich?"},
        *(looked_up if tools else []),
        answer("Yes: it is 4 °C there.", "Snow means cold."),
        {"role": "user", "content": "And gloves?\nOr a hat?"},
        answer("Both.", "At 4 °C both help."),
    ]
