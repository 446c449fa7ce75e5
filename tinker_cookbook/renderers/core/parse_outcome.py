"""How a sampled response ended, and what is wrong with one that cannot be read."""

from __future__ import annotations

import json
from enum import StrEnum

from tinker_cookbook.renderers.core.messages import Message, UnparsedToolCall

PARSE_FAILURE_DETAIL_MAX_CHARS = 16_384
"""Details of a failure are cut here: a model can write without end."""
UNTERMINATED_TOOL_BLOCK_ERROR = "unterminated tool block"
"""Begins ``UnparsedToolCall.error`` where a block of tool calls was opened and never closed."""


class ParseTermination(StrEnum):
    """How a sampled response ended. True in a condition exactly where it ended properly."""

    STOP_SEQUENCE = "stop_sequence"
    """With the renderer's stop sequence, once and at the end."""
    EOS = "eos"
    """With the tokenizer's end-of-sequence token in place of the stop sequence."""
    MALFORMED = "malformed"
    """Cut off (no stop sequence), or with text after the stop sequence."""

    @property
    def is_stop_sequence(self) -> bool:
        """Whether the response ended with the renderer's stop sequence."""
        return self is ParseTermination.STOP_SEQUENCE

    @property
    def is_clean(self) -> bool:
        """Whether the model ended the response itself."""
        return self is not ParseTermination.MALFORMED

    def __bool__(self) -> bool:
        return self.is_clean


class ParseFailureKind(StrEnum):
    """What is wrong with a response, and so whether asking again can help."""

    STRUCTURAL = "structural"
    """It was cut off or went on after its end: the conversation cannot be continued from it."""
    CONTENT = "content"
    """It ended properly, but a tool call in it cannot be read: the model may be told and asked."""


def classify_parse_failure(
    message: Message, termination: ParseTermination
) -> tuple[ParseFailureKind, str] | None:
    """Returns what is wrong with a parsed response and the details for people, None if nothing.

    A response that did not end properly is structural whatever its tool calls; one unreadable call
    among readable ones is a failure of content, and the caller decides whether to act on it.
    """
    if not termination.is_clean:
        return (
            ParseFailureKind.STRUCTURAL,
            f"the response did not terminate cleanly (termination={termination.value}): expected "
            "the renderer's stop sequence, once and at the end; max_tokens may have cut it off",
        )
    unparsed = message.get("unparsed_tool_calls")
    if not unparsed:
        return None
    detail = "\n".join(call.error for call in unparsed)
    return ParseFailureKind.CONTENT, detail[:PARSE_FAILURE_DETAIL_MAX_CHARS]


def detect_unterminated_tool_block(
    content: str, open_marker: str, close_marker: str
) -> UnparsedToolCall | None:
    """Returns the last block of tool calls in ``content`` that is opened and not closed, if any."""
    if content.count(open_marker) <= content.count(close_marker):
        return None
    return unterminated(content[content.rfind(open_marker) :], open_marker, close_marker)


def unterminated(raw_text: str, open_marker: str, close_marker: str) -> UnparsedToolCall:
    """Returns the record of a block of tool calls that was never closed."""
    return UnparsedToolCall(
        raw_text=raw_text[:PARSE_FAILURE_DETAIL_MAX_CHARS],
        error=f"{UNTERMINATED_TOOL_BLOCK_ERROR}: {open_marker} without {close_marker}",
    )


def unread(raw_text: str, error: Exception) -> UnparsedToolCall:
    """Returns the record of a tool call that could not be read, with the reason."""
    invalid = isinstance(error, json.JSONDecodeError)
    reason = f"Invalid JSON: {error}" if invalid else str(error)
    return UnparsedToolCall(raw_text=raw_text, error=reason)
