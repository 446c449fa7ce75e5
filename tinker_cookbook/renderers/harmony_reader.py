"""Reads what gpt-oss writes: messages on channels, one after the other.

A response continues after ``<|start|>assistant``. Each of its messages has a header that ends with
``<|message|>``, and ends with ``<|end|>``, which ``<|start|>assistant`` follows; the last one ends
with the stop token. Analysis is thinking, final and commentary are text, and a message to a
recipient is a tool call, which lasts to the end of the response.
"""

from __future__ import annotations

import json
import re

from tinker_cookbook.renderers.core.messages import ToolCall
from tinker_cookbook.renderers.core.parse_outcome import unread, unterminated
from tinker_cookbook.renderers.core.streaming import ContentDelta, MessageReader, partial_at_end

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONSTRAIN = "<|constrain|>"
FUNCTIONS = "functions."

# The recipient stands behind the role, as the chat template writes it, or behind the channel, as
# the models often do; the type of the content with or without <|constrain|>.
_HEADER = re.compile(
    r"(?P<start><\|start\|>assistant)?(?: to=(?P<by_role>[^\s<]+))?"
    r"<\|channel\|>(?P<channel>\w+)(?: to=(?P<by_channel>[^\s<]+))?"
    r"(?:(?: ?<\|constrain\|>| )[\w.+/-]+)?\s*"
)
_RECIPIENT = re.compile(r" to=([^\s<]+)")
_CALL_BEGUN = re.compile(r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=[^\s<]")
_PARTS = {"analysis": "thinking", "final": "text", "commentary": "text"}
_LONGEST_HEADER = 512  # characters; what is longer is text without a header


def recipient(raw_call: str) -> str | None:
    """Returns to whom a call that could not be read was addressed, None where it does not say."""
    found = _RECIPIENT.search(raw_call.partition(MESSAGE)[0])
    return found[1] if found else None


class HarmonyReader(MessageReader):
    """Messages on channels. What has no header that can be read is text as it stands.

    Texts of messages in a row that are of one kind join to one part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffer = ""
        self._state = "header"  # or what the message is: thinking, text, call
        self._first = True
        self._header = ""  # of the call

    def feed(self, text: str) -> list[ContentDelta]:
        """Takes more text; headers, calls and what may be the beginning of ``<|end|>`` wait."""
        self._buffer += text
        deltas: list[ContentDelta] = []
        while self._state != "call":
            before = self._state, len(self._buffer)
            deltas += self._read_header() if self._state == "header" else self._read_body()
            if (self._state, len(self._buffer)) == before:
                break
        return deltas

    def finish(self) -> list[ContentDelta]:
        """A header without its end is text, or a call that was cut off."""
        rest, self._buffer = self._buffer, ""
        if self._state == "call":
            self._read_call(rest)
            return []
        if self._state == "header" and _CALL_BEGUN.match(rest):
            self.unparsed.append(unterminated(self._call_text(rest), " to=", CALL))
            return []
        return self.add_thinking(rest) if self._state == "thinking" else self.add_text(rest)

    def _read_header(self) -> list[ContentDelta]:
        window = self._buffer[: _LONGEST_HEADER + len(MESSAGE)]
        at, end = window.find(MESSAGE), window.find(END)
        if at < 0 or 0 <= end < at:
            if end >= 0 or len(self._buffer) >= _LONGEST_HEADER + len(MESSAGE):
                self._state = "text"
            return []
        header = self._buffer[:at]
        match = _HEADER.fullmatch(header)
        # A second message has to begin as one.
        if match is None or not (self._first or match["start"]):
            self._state = "text"
            return []
        if match["by_role"] or match["by_channel"]:
            self._state, self._header = "call", self._call_text(header + MESSAGE)
        elif match["channel"] in _PARTS:
            self._state = _PARTS[match["channel"]]
        else:
            self._state = "text"
            return []
        self._buffer = self._buffer[at + len(MESSAGE) :]
        return []

    def _read_body(self) -> list[ContentDelta]:
        add = self.add_thinking if self._state == "thinking" else self.add_text
        at = self._buffer.find(END)
        if at < 0:
            ready = len(self._buffer) - partial_at_end(self._buffer, (END,))
            text, self._buffer = self._buffer[:ready], self._buffer[ready:]
            return add(text)
        text, self._buffer = self._buffer[:at], self._buffer[at + len(END) :]
        self._state, self._first = "header", False
        return add(text)

    def _read_call(self, body: str) -> None:
        to = recipient(self._header) or ""
        try:
            if not to.startswith(FUNCTIONS):
                raise ValueError(f"tool call: to {to!r}, expected a recipient {FUNCTIONS}NAME")
            if not isinstance(json.loads(body), dict):
                raise ValueError("tool call: expected a JSON object of arguments")
        except (ValueError, RecursionError) as error:
            raw = self._header + body
            self.unparsed.append(unread(raw, error))
            return
        # Arguments keep the spelling the model gave them: written again, they are the same tokens.
        function = ToolCall.FunctionBody(name=to.removeprefix(FUNCTIONS), arguments=body)
        self.calls.append(ToolCall(function=function))

    def _call_text(self, text: str) -> str:
        """The call without ``<|start|>assistant``, which is written before it again."""
        return text.removeprefix(f"{START}assistant")
