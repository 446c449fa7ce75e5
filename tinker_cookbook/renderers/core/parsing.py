"""Parsing of responses: tokens in, pieces of the message out, the whole message at the end.

There is one parser. ``Renderer.parse_response`` feeds it all tokens at once and
``parse_response_streaming`` one by one; the message is built from the pieces, so every split of
the tokens results in the same message.
"""

from __future__ import annotations

import json
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
from tinker_cookbook.tokenizer_utils import Tokenizer

PARSE_FAILURE_DETAIL_MAX_CHARS = 16_384
"""Limit of the details of a failure, since a response may be long."""
UNTERMINATED_TOOL_BLOCK_ERROR = "unterminated tool block"
"""Beginning of ``UnparsedToolCall.error`` where a block of tool calls is never closed."""


class ParseTermination(StrEnum):
    """How a sampled response ended; truthy if it ended properly."""

    STOP_SEQUENCE = "stop_sequence"  # the renderer's stop sequence, once and at the end
    EOS = "eos"  # the tokenizer's EOS, or another end of a message, instead of the stop sequence
    MALFORMED = "malformed"  # cut off (no stop sequence), or with text after the stop sequence

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
    """Kind of a parse failure, which decides whether the model can correct it."""

    # Cut off, or with text after its end: the conversation cannot continue from it.
    STRUCTURAL = "structural"
    # Ended properly with a tool call that cannot be parsed: the model may retry.
    CONTENT = "content"


def unterminated(raw_text: str, open_marker: str, close_marker: str) -> UnparsedToolCall:
    """Returns the error record of a block of tool calls that is never closed."""
    return UnparsedToolCall(
        raw_text=raw_text[:PARSE_FAILURE_DETAIL_MAX_CHARS],
        error=f"{UNTERMINATED_TOOL_BLOCK_ERROR}: {open_marker} without {close_marker}",
    )


def unread(raw_text: str, error: Exception) -> UnparsedToolCall:
    """Returns the error record of a tool call that cannot be parsed."""
    kind = "Invalid JSON: " if isinstance(error, json.JSONDecodeError) else ""
    return UnparsedToolCall(raw_text=raw_text, error=f"{kind}{error}")


@dataclass(frozen=True)
class StreamingMessageHeader:
    """Beginning of a message."""

    role: str
    name: str | None = None


@dataclass(frozen=True)
class StreamingTextDelta:
    """More text of content part ``content_index``."""

    text: str
    content_index: int = 0


@dataclass(frozen=True)
class StreamingThinkingDelta:
    """More thinking of content part ``content_index``."""

    thinking: str
    content_index: int = 0


ContentDelta: TypeAlias = StreamingTextDelta | StreamingThinkingDelta
MessageDelta: TypeAlias = StreamingMessageHeader | ContentDelta | Message
"""First a header, then the content piece by piece, last the whole ``Message`` with its calls."""


def partial_at_end(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of ``text`` may begin one of ``marks``."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class Utf8TokenDecoder:
    """Incremental decoder; it buffers the tokens of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer | TextCodec) -> None:
        self.tokenizer = tokenizer.tokenizer if isinstance(tokenizer, TextCodec) else tokenizer
        self._codec = tokenizer if isinstance(tokenizer, TextCodec) else TextCodec(tokenizer)
        self._pending: list[int] = []

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Returns the text that is complete, None if there is none yet."""
        self._pending.extend(tokens)
        # One wrong byte in a run of byte tokens makes all of them replacements: never split a run.
        bytes_run = self._codec.trailing_bytes(self._pending)
        most = len(self._pending) - bytes_run
        # A character has at most four bytes, and a decoder writes U+FFFD for a part of one.
        for waiting in range(min(4, most)):
            ready = self._pending[: most - waiting]
            text = self._codec.decode(ready)
            if text and not text.endswith("\ufffd"):
                self._pending = self._pending[len(ready) :]
                return text
        # The text itself may end in U+FFFD. Only the last three tokens can belong to an incomplete
        # character; one that is complete may still span the cut, which changes the text.
        ready, rest = self._pending[: max(most - 3, 0)], self._pending[max(most - 3, 0) : most]
        text = self._codec.decode(ready)
        if text and text + self._codec.decode(rest) == self._codec.decode([*ready, *rest]):
            self._pending = self._pending[len(ready) :]
            return text
        return None

    def flush(self) -> str:
        """Returns the buffered text, incomplete characters as U+FFFD."""
        text, self._pending = self._codec.decode(self._pending), []
        return text

    def reset(self) -> None:
        """Clears the buffer."""
        self._pending = []

    def has_pending(self) -> bool:
        """Returns whether tokens of an incomplete character are buffered."""
        return bool(self._pending)


class MessageReader:
    """Parser from the text of a response to the parts of a message.

    This class parses plain text; a format with thinking or tool calls has a subclass. ``ending``
    overrides the termination by tokens, for formats whose stop sequence is text. ``is_complete``:
    the text so far is a whole message, also without a stop token after it.
    """

    ending: ParseTermination | None = None
    is_complete = False

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.unparsed: list[UnparsedToolCall] = []
        self._parts: list[ContentPart] = []

    def feed(self, text: str) -> list[ContentDelta]:
        """Parses more text and returns the content that is certain."""
        return self.add_text(text)

    def finish(self) -> list[ContentDelta]:
        """Ends the response and returns the rest of the content."""
        return []

    def settle(self) -> None:
        """Reparses the whole response where needed; called after :meth:`finish` if the model ended
        the response itself."""
        return

    def message(self) -> Message:
        """Returns the message; its content is a string where there is no thinking."""
        # Plain text is a string, as in rows of data.
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
        """Appends text to the content, to the last part if that is text."""
        if not text:
            return []
        last = self._parts[-1] if self._parts else None
        if last is not None and last["type"] == "text":
            last["text"] += text
        else:
            self._parts.append(TextPart(type="text", text=text))
        return [StreamingTextDelta(text, len(self._parts) - 1)]

    def add_thinking(self, thinking: str) -> list[ContentDelta]:
        """Appends thinking to the content, to the last part if that is thinking."""
        if not thinking:
            return []
        last = self._parts[-1] if self._parts else None
        if last is not None and last["type"] == "thinking":
            last["thinking"] += thinking
        else:
            self._parts.append(ThinkingPart(type="thinking", thinking=thinking))
        return [StreamingThinkingDelta(thinking, len(self._parts) - 1)]


class MarkedTextReader(MessageReader):
    """Parser of text up to ``mark``, without ``skip`` at the beginning; ``finish`` of a subclass
    parses ``_rest``, what follows the mark."""

    def __init__(self, mark: str, skip: str) -> None:
        super().__init__()
        self._mark, self._skip = mark, skip
        self._buffer = ""
        self._rest: str | None = None

    def feed(self, text: str) -> list[ContentDelta]:
        """Parses more text; what may begin ``mark`` is buffered."""
        if self._rest is not None:
            self._rest += text
            return []
        self._buffer += text
        if self._skip and self._buffer:
            self._buffer, self._skip = self._buffer.removeprefix(self._skip), ""
        ready, marked, rest = self._buffer.partition(self._mark)
        if marked:
            self._buffer, self._rest = "", rest
            return self.add_text(ready)
        certain = len(ready) - partial_at_end(ready, (self._mark,))
        self._buffer = ready[certain:]
        return self.add_text(ready[:certain])


class ResponseParser:
    """Parser from the tokens of a response to a message: ``feed`` any runs, then ``finish``.

    One of ``stop_tokens`` ends the message, or the tokenizer's EOS as the last token. A response
    without either, or with tokens after the stop token, is MALFORMED.
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

    def parse(self, response: Sequence[int]) -> tuple[Message, ParseTermination]:
        """Parses a whole response; raises RendererError where a stop token occurs twice."""
        tokens = list(response)
        for stop in self._stops:
            if (count := tokens.count(stop)) > 1:
                raise RendererError(
                    f"response: got {count} stop tokens {stop}, expected at most 1, at the end; "
                    "sample with stop=renderer.get_stop_sequences()"
                )
        self.feed(tokens)
        self.finish()
        return self.message, self.termination

    def feed(self, tokens: Sequence[int]) -> list[ContentDelta]:
        """Parses more tokens and returns the content that is certain."""
        if self._stopped:
            self._beyond = self._beyond or len(tokens) > 0
            return []
        # The first stop token ends the message; tokens after it make the response malformed.
        end = next((i for i, token in enumerate(tokens) if token in self._stops), None)
        if end is not None:
            self._stopped = True
            self._beyond = end + 1 < len(tokens)
        # EOS ends the message only as the last token, so it is held back until the next token.
        run = [*self._held_eos, *tokens[:end]]
        self._held_eos = []
        if end is None and run and run[-1] == self._eos:
            self._held_eos = [run.pop()]
        text = self._decoder.decode(run) if run else None
        return self._reader.feed(text) if text else []

    def finish(self) -> list[ContentDelta]:
        """Ends the response and returns the rest of the content."""
        rest = self._decoder.flush()
        deltas = self._reader.feed(rest) if rest else []
        deltas += self._reader.finish()
        # Only a response that the model ended itself is reparsed.
        if self.termination.is_clean:
            self._reader.settle()
        return deltas

    @property
    def message(self) -> Message:
        """Message, complete after :meth:`finish`."""
        return self._reader.message()

    @property
    def termination(self) -> ParseTermination:
        """Termination of the response, valid after :meth:`finish`."""
        if self._reader.ending is not None:
            # Sampling ends at a stop sequence of text, so an EOS after it was not sampled.
            return ParseTermination.MALFORMED if self._held_eos else self._reader.ending
        if self._stopped:
            clean = not self._beyond
            return ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED
        ended = self._held_eos or self._reader.is_complete
        return ParseTermination.EOS if ended else ParseTermination.MALFORMED


class MissingTokenError(RendererError):
    """A tokenizer lacks a special token of a chat format."""


def special_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a special token; MissingTokenError where the vocabulary lacks it."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != token:
        raise MissingTokenError(
            f"the chat format needs the special token {token!r}, which the tokenizer "
            f"{getattr(tokenizer, 'name_or_path', '')!r} does not have"
        )
    return token_id
