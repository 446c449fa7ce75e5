"""What gpt-oss says in one turn of its own, as text: thinking, a preamble, a call or an answer."""

from __future__ import annotations

import json
from itertools import groupby

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.content import ensure_list
from tinker_cookbook.renderers.core.messages import Message, ToolCall
from tinker_cookbook.renderers.harmony_reader import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
    recipient,
)

ASSISTANT = f"{START}assistant"
_TAGS = tuple(f"{CHANNEL}{channel}{MESSAGE}" for channel in ("analysis", "final"))


def calls_tool(message: Message) -> bool:
    """Says whether the message calls a tool, be it in words that cannot be read."""
    return bool(message.get("tool_calls") or message.get("unparsed_tool_calls"))


def is_answer(message: Message) -> bool:
    """Says whether the message ends a turn of the assistant."""
    return message["role"] == "assistant" and not calls_tool(message)


def called_tool(message: Message) -> str | None:
    """Returns the recipient of the message's call, None without one."""
    for call in message.get("tool_calls", []):
        return FUNCTIONS + call.function.name
    unparsed = message.get("unparsed_tool_calls", [])
    return recipient(unparsed[0].raw_text) if unparsed else None


def tag_in(message: Message) -> str | None:
    """Returns the header that stands in the words of the message, which should have none."""
    texts = [text for _, text in _runs(message)]
    return next((tag for tag in _TAGS if any(tag in text for text in texts)), None)


def write_answer(message: Message, *, last: bool, thinks: bool) -> str:
    """Returns what follows ``<|start|>assistant`` where the message calls no tool.

    The last run of text is the answer; text with thinking behind it is a preamble. ``thinks`` says
    whether thinking is written, ``last`` whether the answer ends with ``<|return|>``.
    """
    runs = _runs(message)
    answer = runs.pop()[1] if runs and runs[-1][0] == "text" else ""
    end = f"{CHANNEL}final{MESSAGE}{answer}{RETURN if last else END}"
    parts = [_part(kind, text) for kind, text in runs if thinks or kind == "text"]
    return ASSISTANT.join([*parts, end])


def write_call(
    message: Message, idx: int, *, thinks: bool, text_as_thinking: bool, as_template: bool
) -> str:
    """Returns what follows ``<|start|>assistant`` where the message calls tools.

    ``as_template`` writes the type of the arguments without ``<|constrain|>`` and takes one call.
    RendererError for a call too many, for arguments that are no JSON object, and for text next to
    thinking where text is written as thinking.
    """
    runs = [(kind, text) for kind, text in _runs(message) if text]
    if text_as_thinking:
        if len(runs) > 1:
            raise RendererError(
                f"messages[{idx}].content: got thinking and text beside a tool call, expected one "
                "of them: text_before_call=analysis writes both on one channel; leave the option "
                "out, or drop one of them"
            )
        runs = [("thinking", text) for _, text in runs]
    parts = [_part(kind, text) for kind, text in runs if thinks or kind == "text"]
    calls = [call + CALL for call in _calls(message, idx, as_template)]
    return ASSISTANT.join([*parts, *calls])


def _runs(message: Message) -> list[tuple[str, str]]:
    """The content as runs of ``thinking`` and ``text``, in turn."""
    content = ensure_list(message["content"])
    parts = [(part["type"], str(part.get("text", part.get("thinking", "")))) for part in content]
    grouped = groupby(parts, key=lambda part: part[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in grouped]


def _part(kind: str, text: str) -> str:
    channel = "analysis" if kind == "thinking" else "commentary"
    return f"{CHANNEL}{channel}{MESSAGE}{text}{END}"


def _calls(message: Message, idx: int, as_template: bool) -> list[str]:
    calls, unparsed = message.get("tool_calls", []), message.get("unparsed_tool_calls", [])
    if as_template and len(calls) + len(unparsed) != 1:
        raise RendererError(
            f"messages[{idx}].tool_calls: got {len(calls) + len(unparsed)} calls, expected one: "
            "the chat template of gpt-oss writes one call a message; split the message, each part "
            "followed by the result of its call, or leave out tool_format=template"
        )
    written = [
        _call(call, f"messages[{idx}].tool_calls[{i}]", as_template) for i, call in enumerate(calls)
    ]
    return [*written, *(call.raw_text for call in unparsed)]


def _call(call: ToolCall, where: str, as_template: bool) -> str:
    function = call.function
    try:
        arguments = json.loads(function.arguments)
    except ValueError as error:
        arguments = error
    if not isinstance(arguments, dict):
        raise RendererError(
            f"{where}.function.arguments: got {function.arguments!r}, expected a JSON object"
        )
    kind = "json" if as_template else f"{CONSTRAIN}json"
    return f" to={FUNCTIONS}{function.name}{CHANNEL}commentary {kind}{MESSAGE}{function.arguments}"
