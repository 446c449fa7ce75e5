"""``role_colon``: ``User: …`` and ``Assistant: …`` in plain text, for base models.

Works with any tokenizer, because it uses no special tokens beyond BOS. A message is
``Role: text`` and a blank line; the assistant's answer ends where the user's turn would begin.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.renderers.base import (
    ParseTermination,
    RenderContext,
    RenderedMessage,
    Renderer,
)
from tinker_cookbook.renderers.messages import Message, Role
from tinker_cookbook.renderers.text_only import text_of
from tinker_cookbook.tokenizer_utils import special_id

_NEXT_USER = "User:"
_STOP = "\n\n" + _NEXT_USER


class RoleColonRenderer(Renderer):
    """Plain-text dialogue; thinking, tools and media are refused."""

    @property
    def has_extension_property(self) -> bool:
        """Holds: history is written as it was sampled."""
        return True

    def get_stop_sequences(self) -> list[str]:
        """The beginning of the user's next turn."""
        return [_STOP]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """``Role:`` is header, `` text`` and the blank line output."""
        text = text_of(message, ctx.idx, self._name)
        return RenderedMessage(
            header=self._generation_suffix(message["role"]),
            output=[self.codec.encode(f" {text}\n\n")],
            stop_overlap=self.codec.constant(_NEXT_USER) if message["role"] == "assistant" else (),
        )

    def parse_response(self, response: Sequence[int]) -> tuple[Message, ParseTermination]:
        """Takes the text before the stop sequence or EOS."""
        tokens = list(response)
        eos = special_id(self.tokenizer, "eos")
        ended = bool(tokens) and tokens[-1] == eos
        text, stopped, after = self.codec.decode(tokens[:-1] if ended else tokens).partition(_STOP)
        if stopped:
            clean = not after.strip()
            how = ParseTermination.STOP_SEQUENCE if clean else ParseTermination.MALFORMED
        else:
            how = ParseTermination.EOS if ended else ParseTermination.MALFORMED
        return Message(role="assistant", content=text.removeprefix(" ")), how

    def _bos_tokens(self) -> list[int]:
        bos = special_id(self.tokenizer, "bos")
        return [] if bos is None else [bos]

    def _generation_suffix(self, role: Role) -> list[int]:
        return self.codec.constant(f"{role.capitalize()}:")
