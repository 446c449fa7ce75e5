"""Parsing functions and streaming parsers for renderers of user code (``renderers.base``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tinker_cookbook.renderers.core.blocks import Block, BlockReader
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.messages import (
    ContentPart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    UnparsedToolCall,
)
from tinker_cookbook.renderers.core.parsing import (
    PARSE_FAILURE_DETAIL_MAX_CHARS,
    ContentDelta,
    MessageDelta,
    MessageReader,
    ParseFailureKind,
    ParseTermination,
    ResponseParser,
    StreamingMessageHeader,
    Utf8TokenDecoder,
    unread,
    unterminated,
)
from tinker_cookbook.renderers.core.tool_calls import json_before, read_json_call
from tinker_cookbook.tokenizer_utils import Tokenizer, special_id
from tinker_cookbook.utils.imports import torch

_THINKING_OR_CALL = re.compile(
    "<think>(?P<thinking>.*?)</think>"
    f"|<tool_call>(?P<call>{json_before('</tool_call>')})</tool_call>"
    "|<tool_call>(?P<unread>.*?)</tool_call>",
    re.DOTALL,
)


def classify_parse_failure(
    message: Message, termination: ParseTermination
) -> tuple[ParseFailureKind, str] | None:
    """Returns the kind of a parse failure with its details, None for a valid response.

    A response that did not end properly is a structural failure, whatever its tool calls.
    """
    if not termination.is_clean:
        return (
            ParseFailureKind.STRUCTURAL,
            f"the response did not terminate cleanly (termination={termination.value}): expected "
            "the renderer's stop sequence, once and at the end; max_tokens may have cut it off",
        )
    errors = [call.error for call in message.get("unparsed_tool_calls", [])]
    detail = "\n".join(errors)[:PARSE_FAILURE_DETAIL_MAX_CHARS]
    return (ParseFailureKind.CONTENT, detail) if errors else None


def detect_unterminated_tool_block(
    content: str, open_marker: str, close_marker: str
) -> UnparsedToolCall | None:
    """Returns the last block of tool calls in ``content`` that is not closed, if any."""
    if content.count(open_marker) <= content.count(close_marker):
        return None
    return unterminated(content[content.rfind(open_marker) :], open_marker, close_marker)


def parse_response_for_stop_token(
    response: Sequence[int], tokenizer: Tokenizer, stop_token: int
) -> tuple[Message, ParseTermination]:
    """Returns the text before ``stop_token`` as an assistant message, and how it ended.

    Raises RendererError where ``stop_token`` occurs more than once.
    """
    eos = special_id(tokenizer, "eos")
    return ResponseParser(TextCodec(tokenizer), MessageReader(), [stop_token], eos).parse(response)


def parse_content_blocks(
    content: str,
) -> tuple[list[ContentPart], list[ToolCall | UnparsedToolCall]] | None:
    """Splits text into thinking and text parts, and the calls between ``<tool_call>`` tags.

    White space is unchanged; a block that is not closed is text. Returns None without such tags.
    """
    if "<think>" not in content and "<tool_call>" not in content:
        return None
    parts: list[ContentPart] = []
    calls: list[ToolCall | UnparsedToolCall] = []
    end = 0
    for block in _THINKING_OR_CALL.finditer(content):
        parts.append(TextPart(type="text", text=content[end : block.start()]))
        end = block.end()
        if block["thinking"] is not None:
            parts.append(ThinkingPart(type="thinking", thinking=block["thinking"]))
            continue
        try:
            calls += read_json_call(block["call"] or block["unread"] or "")
        except ValueError as error:
            calls.append(unread(block[0], error))
    parts.append(TextPart(type="text", text=content[end:]))
    return [part for part in parts if part.get("text") or part.get("thinking")], calls


def parse_think_blocks(content: str) -> list[ContentPart] | None:
    """Splits text at ``<think>…</think>`` into thinking and text parts, white space untouched.

    Returns None without a ``<think>``. Empty parts are left out. A block that is never closed (the
    sample was cut off) is thinking to its end.
    """
    if "<think>" not in content:
        return None
    parts: list[ContentPart] = []
    rest = content
    while rest:
        text, opened, rest = rest.partition("<think>")
        if text:
            parts.append(TextPart(type="text", text=text))
        if not opened:
            break
        thinking, _, rest = rest.partition("</think>")
        if thinking:
            parts.append(ThinkingPart(type="thinking", thinking=thinking))
    return parts


def tokens_weights_from_strings_weights(
    strings_weights: Sequence[tuple[str, float]], tokenizer: Tokenizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes strings one after the other and gives each token its string's weight.

    Returns int64 tokens [T] and float32 weights [T]. The first string is encoded with the special
    tokens that the tokenizer adds (BOS), the others without.
    """
    runs = [
        tokenizer.encode(text, add_special_tokens=i == 0)
        for i, (text, _) in enumerate(strings_weights)
    ]
    tokens = torch.tensor([token for run in runs for token in run], dtype=torch.int64)
    values = torch.tensor([weight for _, weight in strings_weights], dtype=torch.float32)
    return tokens, values.repeat_interleave(torch.tensor([len(run) for run in runs]))


@dataclass
class StreamingParser:
    """Parser that is fed one token at a time, for renderers with another final parser.

    It yields a header, the text, and last the message. Tokens after ``end_message_token`` are
    ignored; ``parse_final_response`` returns the message of all tokens, as
    ``Renderer.parse_response`` does.
    """

    tokenizer: Tokenizer
    end_message_token: int
    parse_final_response: Callable[[list[int]], tuple[Message, ParseTermination]]

    _blocks: ClassVar[tuple[Block, ...]] = ()

    def __post_init__(self) -> None:
        self._decoder = Utf8TokenDecoder(self.tokenizer)
        self.reset()

    def feed(self, token: int) -> Iterator[MessageDelta]:
        """Parses one token; yields the header once, and then certain content."""
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
        yield from self._begin([*self._reader.feed(rest), *self._reader.finish()])
        yield self.parse_final_response(self._tokens)[0]

    def reset(self) -> None:
        """Resets the parser for another response."""
        self._decoder.reset()
        self._reader = BlockReader(self._blocks)
        self._tokens: list[int] = []
        self._begun = self._finished = False

    def _begin(self, deltas: list[ContentDelta]) -> Iterator[MessageDelta]:
        if not self._begun:
            self._begun = True
            yield StreamingMessageHeader(role="assistant")
        yield from deltas


class ReasoningStreamingParser(StreamingParser):
    """Streaming parser that yields text between ``<think>`` tags as thinking."""

    _blocks = (Block("<think>", "</think>"),)
