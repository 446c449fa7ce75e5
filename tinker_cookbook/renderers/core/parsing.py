"""Parsing of responses: tokens in, pieces of the message out, the whole message at the end.

There is one parser. ``Renderer.parse_response`` feeds it all tokens at once and
``parse_response_streaming`` one by one; the message is built from the pieces, so every split of
the tokens results in the same message.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.messages import (
    ContentPart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    UnparsedToolCall,
)
from tinker_cookbook.tokenizer_utils import Tokenizer, special_id

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


_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character
_MAX_CHARACTER_TOKENS = 4  # bytes of the longest character in UTF-8


@dataclass(frozen=True)
class StreamingMessageHeader:
    """A message begins."""

    role: str
    name: str | None = None


@dataclass(frozen=True)
class StreamingTextDelta:
    """More text. ``content_index`` counts the parts of the message's content from 0."""

    text: str
    content_index: int = 0


@dataclass(frozen=True)
class StreamingThinkingDelta:
    """More thinking. ``content_index`` counts the parts of the message's content from 0."""

    thinking: str
    content_index: int = 0


ContentDelta: TypeAlias = StreamingTextDelta | StreamingThinkingDelta
MessageDelta: TypeAlias = StreamingMessageHeader | ContentDelta | Message
"""A header first, then the content piece by piece, last the whole ``Message``, calls included."""


def partial_at_end(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of ``text`` may be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


class Utf8TokenDecoder:
    """Decodes tokens as they come; a character that spans tokens waits for the last of them."""

    def __init__(self, tokenizer: Tokenizer | TextCodec) -> None:
        self.tokenizer = tokenizer.tokenizer if isinstance(tokenizer, TextCodec) else tokenizer
        self._codec = tokenizer if isinstance(tokenizer, TextCodec) else TextCodec(tokenizer)
        self._pending: list[int] = []

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Returns the text that has become certain, None where there is none yet."""
        self._pending.extend(tokens)
        # Bytes in a row decode to replacements, all of them, where one is wrong: never split them.
        bytes_run = self._codec.trailing_bytes(self._pending)
        most = len(self._pending) - bytes_run
        for waiting in range(min(_MAX_CHARACTER_TOKENS, most)):
            ready = self._pending[: most - waiting]
            text = self._codec.decode(ready)
            if text and not text.endswith(_REPLACEMENT):
                self._pending = self._pending[len(ready) :]
                return text
        return None

    def flush(self) -> str:
        """Returns the text of what still waits, broken characters as U+FFFD."""
        text, self._pending = self._codec.decode(self._pending), []
        return text

    def reset(self) -> None:
        """Forgets what waits."""
        self._pending = []

    def has_pending(self) -> bool:
        """Whether tokens wait for the rest of a character."""
        return bool(self._pending)


class MessageReader(ABC):
    """Reads the text of one response into the parts of a message; a chat format subclasses it.

    ``ending`` overrules how the tokens ended, for formats whose stop sequence is text.
    """

    ending: ParseTermination | None = None

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.unparsed: list[UnparsedToolCall] = []
        self._parts: list[ContentPart] = []

    @abstractmethod
    def feed(self, text: str) -> list[ContentDelta]:
        """Takes more text; returns what has become certain of the content."""

    @abstractmethod
    def finish(self) -> list[ContentDelta]:
        """Takes the end of the response; returns the rest of the content."""

    def settle(self) -> None:
        """Called at the end of a response that the model ended itself, after :meth:`finish`: the
        last chance to read the whole of it in another way."""
        return

    def message(self) -> Message:
        """Returns what was read. Content is a string where there is no thinking."""
        content: str | list[ContentPart] = self._parts
        if all(part["type"] == "text" for part in self._parts):
            content = "".join(part["text"] for part in self._parts if part["type"] == "text")
        message = Message(role="assistant", content=content)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.unparsed:
            message["unparsed_tool_calls"] = self.unparsed
        return message

    def add_text(self, text: str) -> list[ContentDelta]:
        """Appends text to the content."""
        if not text:
            return []
        last = self._parts[-1] if self._parts else None
        if last is not None and last["type"] == "text":
            last["text"] += text
        else:
            self._parts.append(TextPart(type="text", text=text))
        return [StreamingTextDelta(text, len(self._parts) - 1)]

    def add_thinking(self, thinking: str) -> list[ContentDelta]:
        """Appends thinking to the content."""
        if not thinking:
            return []
        last = self._parts[-1] if self._parts else None
        if last is not None and last["type"] == "thinking":
            last["thinking"] += thinking
        else:
            self._parts.append(ThinkingPart(type="thinking", thinking=thinking))
        return [StreamingThinkingDelta(thinking, len(self._parts) - 1)]


class PlainReader(MessageReader):
    """Everything is text."""

    def feed(self, text: str) -> list[ContentDelta]:
        """Passes text on."""
        return self.add_text(text)

    def finish(self) -> list[ContentDelta]:
        """Nothing waits."""
        return []


class ResponseParser:
    """Tokens of one response to a message: ``feed`` them in any cut, then ``finish``.

    ``stop_tokens`` end the message; one of the tokens after them, or none of them, is MALFORMED.
    The tokenizer's EOS ends it too, where it comes last.
    """

    def __init__(
        self,
        codec: TextCodec,
        reader: MessageReader,
        stop_tokens: Collection[int],
        eos: int | None,
    ) -> None:
        self._decoder = Utf8TokenDecoder(codec)
        self._reader = reader
        self._stops = frozenset(stop_tokens)
        self._eos = None if eos in self._stops else eos
        self._stopped = False
        self._beyond = False  # tokens came after the stop token
        self._held_eos: list[int] = []

    def check_stops(self, response: Sequence[int]) -> None:
        """Raises RendererError where a stop token occurs twice in a whole response."""
        for stop in self._stops:
            if (count := response.count(stop)) > 1:
                raise RendererError(
                    f"response: got {count} stop tokens {stop}, expected at most 1, at the end; "
                    "sample with stop=renderer.get_stop_sequences()"
                )

    def feed(self, tokens: Sequence[int]) -> list[ContentDelta]:
        """Takes more tokens; returns what has become certain of the content."""
        if self._stopped:
            self._beyond = self._beyond or len(tokens) > 0
            return []
        end = next((i for i, token in enumerate(tokens) if token in self._stops), None)
        if end is not None:
            self._stopped = True
            self._beyond = end + 1 < len(tokens)
        run = [*self._held_eos, *tokens[:end]]
        self._held_eos = []
        if end is None and run and run[-1] == self._eos:
            self._held_eos = [run.pop()]
        text = self._decoder.decode(run) if run else None
        return self._reader.feed(text) if text else []

    def finish(self) -> list[ContentDelta]:
        """Takes the end of the tokens; returns the rest of the content."""
        rest = self._decoder.flush()
        deltas = self._reader.feed(rest) if rest else []
        deltas += self._reader.finish()
        if self.termination.is_clean:
            self._reader.settle()
        return deltas

    @property
    def message(self) -> Message:
        """What was read: complete after :meth:`finish`."""
        return self._reader.message()

    @property
    def termination(self) -> ParseTermination:
        """How the response ended, after :meth:`finish`."""
        if self._reader.ending is not None:
            # A stop sequence of text ends sampling: EOS behind it was not sampled after the stop.
            return ParseTermination.MALFORMED if self._held_eos else self._reader.ending
        if self._stopped:
            clean = not self._beyond
            return ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED
        return ParseTermination.EOS if self._held_eos else ParseTermination.MALFORMED


def special_token_id(tokenizer: Tokenizer, token: str, renderer: str) -> int:
    """Returns the id of a special token; RendererError where the vocabulary has no such token."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != token:
        raise RendererError(
            f"renderer_name: {renderer} needs the special token {token!r}, which the tokenizer "
            f"{getattr(tokenizer, 'name_or_path', '')!r} does not have; choose the renderer of "
            "the model's family, or role_colon, which works with any tokenizer"
        )
    return token_id


def parse_response_for_stop_token(
    response: Sequence[int], tokenizer: Tokenizer, stop_token: int
) -> tuple[Message, ParseTermination]:
    """Returns the text before ``stop_token`` as an assistant message, and how it ended.

    Raises RendererError where ``stop_token`` occurs more than once.
    """
    eos = special_id(tokenizer, "eos")
    parser = ResponseParser(TextCodec(tokenizer), PlainReader(), [stop_token], eos)
    tokens = list(response)
    parser.check_stops(tokens)
    parser.feed(tokens)
    parser.finish()
    return parser.message, parser.termination
