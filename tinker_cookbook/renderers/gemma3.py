"""Gemma 3: ``<start_of_turn>user``, a line break, the text, ``<end_of_turn>``.

The format has no system message: its text and a blank line begin the first user message. User and
assistant alternate, and white space around every text is trimmed. An image stands between
``<start_of_image>`` and ``<end_of_image>``, with a blank line on both sides.
"""

from __future__ import annotations

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.chatml import LineSeparated
from tinker_cookbook.renderers.core.checks import text_of
from tinker_cookbook.renderers.core.images import content_segments, encode_segments
from tinker_cookbook.renderers.core.messages import Message, Role, ensure_list
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, token_list

_START, _END = "<start_of_turn>", "<end_of_turn>"
_AROUND_IMAGE = ("\n\n<start_of_image>", "<end_of_image>\n\n")
# What may come before a message of each role; None is the beginning of the conversation.
_BEFORE: dict[Role, tuple[Role | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user",),
}


class Gemma3Renderer(LineSeparated):
    """Gemma 3 dialogue, with images in messages of users; tools, thinking and roles out of order
    raise RendererError.

    So does a system message without a user message, which the template would drop.
    """

    _encodes_with_codec = True
    stop_token = _END
    _bos = "<bos>"
    _special_tokens = (_bos, _START)
    _history_as_sampled = True  # except for white space around it

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns header, trimmed text and ``<end_of_turn>``; a system message opens a turn."""
        role, content = message["role"], message["content"]
        has_images = role == "user" and any(p["type"] == "image" for p in ensure_list(content))
        text = "" if has_images else text_of(message, ctx.idx, self._name)
        if ctx.prev_role not in _BEFORE.get(role, ()):
            after = f"after {ctx.prev_role!r}" if ctx.prev_role else "first"
            raise RendererError(
                f"messages[{ctx.idx}].role: got {role!r} {after}, expected user and assistant in "
                f"turn after at most one system message: {self._name} has no other form; join "
                "messages of one role, or drop what is out of order"
            )
        if role == "system":
            if ctx.next_message is None:
                raise RendererError(
                    f"messages[{ctx.idx}]: got a system message alone, expected a user message "
                    f"after it: {self._name} writes a system prompt only at the beginning of a "
                    "question"
                )
            # Line breaks at the beginning of the text merge with the header's and count as header.
            # At the end trimmed text follows, and no token spans a line break and another
            # character.
            border = len(self.codec.constant(self._header("user")))
            tokens = self.codec.encode(f"{self._header('user')}{text}\n\n")
            return RenderedMessage(header=tokens[:border], output=[tokens[border:]])
        if has_images:
            return self._with_images(message, ctx)
        # The template trims each part.
        if not isinstance(content, str):
            text = "".join(part.get("text", "").strip() for part in content)
        # The header of a system message has already opened the user turn.
        header = "" if ctx.prev_role == "system" else self._begin(role, ctx)
        return RenderedMessage(
            header=self.codec.constant(header),
            output=[self.codec.encode(f"{text.strip()}{_END}")],
        )

    def _with_images(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        header = "" if ctx.prev_role == "system" else self._begin("user", ctx)
        parts = [
            {**part, "text": part["text"].strip()} if part["type"] == "text" else part
            for part in ensure_list(message["content"])
        ]
        trimmed: Message = {**message, "content": parts}  # type: ignore[typeddict-item]
        segments = content_segments(trimmed, ctx.idx, self, _AROUND_IMAGE)
        # The blank line before an image merges with the header's line break: it counts as header.
        first, *rest = encode_segments([header, *segments, _END], self.codec.encode)
        tokens, border = token_list(first), len(self.codec.constant(header))
        return RenderedMessage(header=tokens[:border], output=[tokens[border:], *rest])

    def _header(self, role: Role) -> str:
        # Gemma calls the assistant "model".
        return f"{_START}{'model' if role == 'assistant' else role}\n"
