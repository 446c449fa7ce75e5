"""Responses with tagged blocks in them: thinking, and tool calls.

Nearly every chat format is text with blocks between tags. A format lists its blocks; this module
finds them in text that comes in pieces of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinker_cookbook.renderers.core.messages import ToolCall
from tinker_cookbook.renderers.core.parsing import (
    ContentDelta,
    MessageReader,
    partial_at_end,
    unread,
    unterminated,
)


@dataclass(frozen=True)
class Block:
    """Kind of a tagged block. White space that the format writes around the block is not
    content."""

    opening: str
    closing: str
    # Parses the tool calls between the tags; raises ValueError for anything else. None: the block
    # is thinking.
    read: Callable[[str], Sequence[ToolCall]] | None = None
    trim: str = ""  # characters stripped from both ends of thinking
    before: tuple[str, ...] = ()  # the first of these that ends the text before it is dropped
    after: str = ""  # characters stripped from the beginning of the text that follows
    # Finds the closing tag of calls, whose values may contain that tag; -1: there is none yet.
    find_end: Callable[[str], int] | None = None


class BlockReader(MessageReader):
    """Parser of text with blocks.

    ``inside`` is the block that the prompt has opened, if any. ``skip`` are characters that the
    format writes before text: they are dropped at the beginning of a response.

    If the model ends a response without closing the thinking that the prompt opened, the response
    is an answer without thinking: text, with its tool calls. Deltas streamed before the end are
    thinking nevertheless. A response that was cut off remains thinking.
    """

    def __init__(
        self, blocks: Sequence[Block], inside: Block | None = None, skip: str = ""
    ) -> None:
        super().__init__()
        self._blocks = self.blocks = tuple(blocks)
        self._needles = tuple(
            before + block.opening for block in blocks for before in ("", *block.before)
        )
        self._inside = self.inside = inside
        # The block that the prompt opened, as long as the response has not left it.
        self._unclosed = inside
        self._skip = inside.trim if inside else skip  # characters dropped until another one comes
        self._opened_by_prompt = inside.opening if inside else ""
        self._buffer = ""
        self._searched = 0  # the closing tag of a call is not before this position

    def feed(self, text: str) -> list[ContentDelta]:
        """Parses more text; what may be the beginning of a tag is buffered."""
        self._buffer += text
        return self._advance(ended=False)

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer; a block without its end is thinking, or an unparsed call."""
        deltas = self._advance(ended=True)
        rest, self._buffer = self._buffer.lstrip(self._skip), ""
        block = self._inside
        if block is None:
            return [*deltas, *self.add_text(rest)]
        if block.read is None:
            return [*deltas, *self.add_thinking(rest.rstrip(block.trim))]
        self.unparsed.append(unterminated(block.opening + rest, block.opening, block.closing))
        return deltas

    def settle(self) -> None:
        """Parses a response that never closed the prompt's thinking as text."""
        if self._unclosed is None or self._unclosed.read is not None:
            return
        # Parse the text again, now outside of the thinking block.
        reader = BlockReader(self._blocks)
        reader.feed("".join(str(part.get("thinking", "")) for part in self._parts))
        reader.finish()
        self._parts, self.calls, self.unparsed = reader._parts, reader.calls, reader.unparsed

    def _advance(self, ended: bool) -> list[ContentDelta]:
        # A response may repeat the tag that the prompt wrote: drop it, and wait while uncertain.
        if opening := self._opened_by_prompt:
            start = self._buffer.lstrip(self._skip)
            if not ended and len(start) < len(opening) and opening.startswith(start):
                return []
            if start.startswith(opening):
                self._buffer = start[len(opening) :]
            self._opened_by_prompt = ""
        # Alternate between text and blocks until neither changes the buffer.
        deltas: list[ContentDelta] = []
        before = None
        while before != (self._inside, len(self._buffer)):
            before = self._inside, len(self._buffer)
            block = self._inside
            if block is None:
                deltas += self._read_text()
            elif block.read is None:
                deltas += self._read_thinking(block)
            else:
                self._read_calls(block, ended)
        return deltas

    def _read_text(self) -> list[ContentDelta]:
        self._buffer = self._buffer.lstrip(self._skip)
        if self._buffer:
            self._skip = ""
        # The first opening tag in the buffer decides the block.
        found = [(at, b) for b in self._blocks if (at := self._buffer.find(b.opening)) >= 0]
        if not found:
            # Keep what may be an opening tag or white space before one.
            waiting = partial_at_end(self._buffer, self._needles)
            return self.add_text(self._take(len(self._buffer) - waiting))
        at, block = min(found, key=lambda match: match[0])
        text = self._take(at)
        self._take(len(block.opening))
        dropped = next((before for before in block.before if text.endswith(before)), "")
        self._inside, self._skip = block, block.trim
        return self.add_text(text.removesuffix(dropped))

    def _read_calls(self, block: Block, ended: bool) -> None:
        assert block.read is not None
        first = end = self._buffer.find(block.closing, self._searched)
        if end >= 0 and block.find_end is not None:
            end = block.find_end(self._buffer)
        if ended and end < 0:  # the block has no proper end, so that the first tag ends it
            end = self._buffer.find(block.closing)
        if end < 0:
            # Only text with another closing tag has to be searched again.
            last = self._buffer.rfind(block.closing) if first >= 0 else -1
            self._searched = max(last + 1, len(self._buffer) - len(block.closing) + 1, 0)
            return
        body, self._searched = self._take(end), 0
        try:
            self.calls.extend(block.read(body))
        except ValueError as error:
            self.unparsed.append(unread(f"{block.opening}{body}{block.closing}", error))
        self._leave(block)

    def _read_thinking(self, block: Block) -> list[ContentDelta]:
        end = self._buffer.find(block.closing)
        inner = self._buffer if end < 0 else self._buffer[:end]
        thinking = inner.lstrip(self._skip)
        if thinking:
            self._skip = ""
        self._take(len(inner) - len(thinking))
        if end >= 0:
            self._take(len(thinking))
            self._leave(block)
            return self.add_thinking(thinking.rstrip(block.trim))
        # Stream thinking except for what may be the closing tag or trailing white space.
        ready = thinking[: len(thinking) - partial_at_end(thinking, (block.closing,))]
        return self.add_thinking(self._take(len(ready.rstrip(block.trim))))

    def _leave(self, block: Block) -> None:
        self._take(len(block.closing))
        self._inside = self._unclosed = None
        self._skip = block.after

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken
