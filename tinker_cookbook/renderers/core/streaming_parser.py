"""Parsers that are fed one token at a time, in the form of the official cookbook.

Renderers of this package read responses with :class:`~tinker_cookbook.renderers.core.streaming.\
ResponseParser`; these classes are for renderers and programs that bring their own final parser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.messages import Message
from tinker_cookbook.renderers.core.parse_outcome import ParseTermination
from tinker_cookbook.renderers.core.streaming import (
    ContentDelta,
    MessageDelta,
    MessageReader,
    PlainReader,
    StreamingMessageHeader,
    Utf8TokenDecoder,
)
from tinker_cookbook.tokenizer_utils import Tokenizer


@dataclass
class StreamingParser:
    """Turns tokens into deltas: a header, text, and last the message.

    Args:
        tokenizer: Decodes the tokens.
        end_message_token: Ends the message; tokens after it are ignored.
        parse_final_response: Makes the message of all tokens, as ``Renderer.parse_response`` does.
    """

    tokenizer: Tokenizer
    end_message_token: int
    parse_final_response: Callable[[list[int]], tuple[Message, ParseTermination]]
    _tokens: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = Utf8TokenDecoder(self.tokenizer)
        self.reset()

    def feed(self, token: int) -> Iterator[MessageDelta]:
        """Takes one token; yields what has become certain, behind a header the first time."""
        if self._finished:
            return
        self._tokens.append(token)
        if token == self.end_message_token:
            self._finished = True
            return
        text = self._decoder.decode([token])
        if text is not None:
            yield from self._begin(self._reader.feed(text))

    def finish(self) -> Iterator[MessageDelta]:
        """Yields the rest of the content and the whole message."""
        rest = self._decoder.flush()
        deltas = self._reader.feed(rest) if rest else []
        yield from self._begin([*deltas, *self._reader.finish()])
        yield self.parse_final_response(self._tokens)[0]

    def reset(self) -> None:
        """Forgets everything that was fed."""
        self._decoder.reset()
        self._reader = self._make_reader()
        self._tokens = []
        self._begun = False
        self._finished = False

    def _make_reader(self) -> MessageReader:
        return PlainReader()

    def _begin(self, deltas: list[ContentDelta]) -> Iterator[MessageDelta]:
        if not self._begun:
            self._begun = True
            yield StreamingMessageHeader(role="assistant")
        yield from deltas


@dataclass
class ReasoningStreamingParser(StreamingParser):
    """As its base; what stands between ``<think>`` and ``</think>`` comes as thinking."""

    def _make_reader(self) -> MessageReader:
        return BlockReader((Block("<think>", "</think>"),))
