"""``role_colon``: ``User: …`` and ``Assistant: …`` in plain text, for base models.

It works with any tokenizer, because it uses no special token but BOS. A message is ``Role: text``
and a blank line; an answer ends where the next user turn would begin.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.renderers.core.checks import TEXT, check_parts, text_of
from tinker_cookbook.renderers.core.messages import Message, Role, ensure_text
from tinker_cookbook.renderers.core.parsing import (
    ContentDelta,
    MarkedTextReader,
    MessageReader,
    ParseTermination,
)
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.core.thinking import ChecksTrainedAnswers
from tinker_cookbook.tokenizer_utils import special_id

_NEXT_USER = "User:"
_STOP = "\n\n" + _NEXT_USER


class RoleColonRenderer(ChecksTrainedAnswers):
    """Plain-text dialogue; thinking, images and audio raise RendererError.

    The format has no tool calls: prompts leave them out, with a warning, and an answer with them
    is not trained.
    """

    _encodes_with_codec = True
    _history_as_sampled = True

    def get_stop_sequences(self) -> list[str]:
        """Returns the beginning of the next user turn."""
        return [_STOP]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns ``Role:`` as header, and the text and a blank line as output."""
        check_parts(message, ctx.idx, self._name, TEXT, self.model_name)
        if message.get("tool_calls") or message.get("unparsed_tool_calls"):
            self._warn_once(
                f"{self._name}: has no form for tool calls, which are left out; use a renderer "
                "with tools, such as qwen3 or llama3"
            )
        text = ensure_text(message["content"])
        return RenderedMessage(
            header=self.codec.constant(self._header(message["role"])),
            # The prompt ends with the colon, so the model samples the space.
            output=[self.codec.encode(f" {text}\n\n")],
            # The rest of the stop sequence, which also begins the next header.
            stop_overlap=self.codec.constant(_NEXT_USER) if message["role"] == "assistant" else (),
        )

    def _check_trained(self, messages: Sequence[Message], idx: int) -> None:
        text_of(messages[idx], idx, self._name)

    def _reader(self) -> MessageReader:
        return _UntilUser(_STOP, " ")

    @property
    def _bos_tokens(self) -> list[int]:
        bos = special_id(self.tokenizer, "bos")
        return [] if bos is None else [bos]

    def _header(self, role: Role) -> str:
        return f"{role.capitalize()}:"


class _UntilUser(MarkedTextReader):
    """Parser of text up to the next user turn, without the leading space."""

    def finish(self) -> list[ContentDelta]:
        """Flushes the buffer as text."""
        if self._rest is None:
            return self.add_text(self._buffer.removesuffix("\n\n"))  # it ends every message
        # Sampling may end with white space after the stop sequence.
        clean = not self._rest.strip()
        self.ending = ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED
        return []
