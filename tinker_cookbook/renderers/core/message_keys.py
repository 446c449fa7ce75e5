"""Keys of messages: other names of keys that are read, and keys that must not be ignored.

Message rows come from many programs. A key that changes what a model should see or learn is read or
refused; any other unknown key (``id``, ``timestamp``) is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from tinker_cookbook.exceptions import RendererError

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of the text that precedes an answer: DeepSeek and vLLM, OpenRouter, gpt-oss."""

_CALLS = '"tool_calls": [{"function": {"name": "…", "arguments": "…"}}]'
_PARTS = 'a part of the content: {"type": "image", "image": "FILE"}'
_TOOLS = "the tools next to messages, or in the first system message of a row of data"
_REASONING = '"reasoning_content": "…"'
_TRAINABLE = '"trainable": true or false, with train_on_what=customized'

# Flags are refused with any value: their meaning depends on the values of other messages.
FLAGS = dict.fromkeys(
    (
        *("weight", "loss", "loss_mask", "loss_scale", "loss_weight"),
        *("train", "train_detail", "training", "is_train", "mask", "masked"),
    ),
    _TRAINABLE,
)
# These are refused unless they are empty.
_UNREADABLE = {
    "function_call": _CALLS,
    "ignore": _TRAINABLE,
    **dict.fromkeys(("tools", "tool_defs", "available_tools", "functions"), _TOOLS),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _PARTS),
    **dict.fromkeys(
        (
            *("thought", "thoughts", "think", "chain_of_thought", "cot"),
            *("reasoning_details", "reasoning_text", "analysis"),
        ),
        _REASONING,
    ),
}
KNOWN_KEYS = frozenset(
    (
        *("role", "content", "name", "tool_calls", "unparsed_tool_calls", "tool_call_id"),
        *("trainable", *REASONING_KEYS),
    )
)
_CLOSE = 0.85


@lru_cache
def misspelt(name: str, known: frozenset[str]) -> str | None:
    """Returns the known name that an unknown one misspells: ``tool_calls`` for ``tool_call``."""
    # Rows of a dataset have the same names, so they are compared once.
    return next(iter(get_close_matches(name, known, n=1, cutoff=_CLOSE)), None)


def check_keys(message: Mapping[str, Any], where: str) -> None:
    """Raises RendererError for a key that would change what a model sees or learns if ignored."""
    for key in message.keys() - KNOWN_KEYS:
        value, name = message[key], str(key).lower()
        if value is None:
            continue
        if name in FLAGS:
            raise RendererError(f"{where}: got {key!r}, expected {FLAGS[name]}")
        # Servers send the details next to the text, which is enough.
        if name == "reasoning_details" and any(message.get(other) for other in REASONING_KEYS):
            continue
        if name in _UNREADABLE:
            if value:
                raise RendererError(f"{where}: got {key!r}, expected {_UNREADABLE[name]}")
        elif meant := misspelt(name, KNOWN_KEYS):
            raise RendererError(
                f"{where}: got {key!r}, which is no key of a message; did you mean {meant!r}?"
            )


def take_reasoning(message: dict[str, Any], where: str) -> str:
    """Removes the reasoning under any of its names and returns it, "" if there is none.

    Raises RendererError for different texts under two names, and for other values than texts.
    """
    found = ""
    for key in REASONING_KEYS:
        text = message.pop(key, None)
        if not text:
            continue
        if not isinstance(text, str):
            raise RendererError(f"{where}.{key}: got {text!r:.80}, expected a text")
        if found and text != found:
            raise RendererError(
                f"{where}.{key}: got another text than in the message's other keys of reasoning "
                f"({', '.join(REASONING_KEYS)}), expected one of them"
            )
        found = text
    return found
