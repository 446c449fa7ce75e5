"""Gemma 3: ``<start_of_turn>user``, a line break, the text, ``<end_of_turn>``.

The format has no system message: its text and a blank line begin the first user message. User and
assistant alternate, and white space around every text is trimmed.
"""

from __future__ import annotations

from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.checks import text_of
from tinker_cookbook.renderers.core.messages import Message, Role
from tinker_cookbook.renderers.core.parsing import special_token_id
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage
from tinker_cookbook.tokenizer_utils import Tokenizer

_BOS, _START, _END = "<bos>", "<start_of_turn>", "<end_of_turn>"
# What may come before a message of each role; None is the beginning of the conversation.
_BEFORE: dict[Role, tuple[Role | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user",),
}


class Gemma3Renderer(Renderer):
    """Gemma 3 dialogue; images, tools, thinking and roles out of order raise RendererError.

    So does a system message without a user message, which the template would drop.
    """

    _encodes_with_codec = True
    stop_token = _END
    _history_as_sampled = True  # except for white space around it

    def __init__(self, tokenizer: Tokenizer, image_processor: Any = None) -> None:
        super().__init__(tokenizer, image_processor)
        self._bos = special_token_id(tokenizer, _BOS, type(self).__name__)
        special_token_id(tokenizer, _START, type(self).__name__)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns header, trimmed text and ``<end_of_turn>``; a system message opens a turn."""
        text = text_of(message, ctx.idx, self._name)
        self._check_order(message["role"], ctx)
        if message["role"] == "system":
            return self._system(text)
        text = _trimmed(message)
        # The header of a system message has already opened the user turn.
        return RenderedMessage(
            header=() if ctx.prev_role == "system" else self._generation_suffix(message["role"]),
            output=[self.codec.encode(f"{text}{_END}")],
            footer=self.codec.constant("\n"),
        )

    @property
    def _bos_tokens(self) -> list[int]:
        return [self._bos]

    def _generation_suffix(self, role: Role) -> list[int]:
        # Gemma calls the assistant "model".
        role = "model" if role == "assistant" else role
        return self.codec.constant(f"{_START}{role}\n")

    def _system(self, text: str) -> RenderedMessage:
        # Line breaks at the beginning of the text merge with the header's and count as header. At
        # the end trimmed text follows, and no token spans a line break and another character.
        header = self._generation_suffix("user")
        tokens = self.codec.encode(f"{_START}user\n{text}\n\n")
        return RenderedMessage(header=tokens[: len(header)], output=[tokens[len(header) :]])

    def _check_order(self, role: Role, ctx: RenderContext) -> None:
        if ctx.prev_role not in _BEFORE.get(role, ()):
            after = f"after {ctx.prev_role!r}" if ctx.prev_role else "first"
            raise RendererError(
                f"messages[{ctx.idx}].role: got {role!r} {after}, expected user and assistant in "
                f"turn behind at most one system message: {self._name} has no other form; join "
                "messages of one role, or drop what is out of order"
            )
        if role == "system" and ctx.next_message is None:
            raise RendererError(
                f"messages[{ctx.idx}]: got a system message alone, expected a user message after "
                f"it: {self._name} writes a system prompt only at the beginning of a question"
            )


def _trimmed(message: Message) -> str:
    """Returns the text with each part trimmed, as the template does."""
    content = message["content"]
    if isinstance(content, str):
        return content.strip()
    return "".join(part["text"].strip() for part in content if part["type"] == "text")
