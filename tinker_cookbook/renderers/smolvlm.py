"""SmolVLM and Idefics3: ``User: text<end_of_utterance>`` with images between the texts.

A message begins with its role, a colon and a space, which an image at the beginning replaces. The
prompt ends with ``Assistant:``, so the model samples the space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinker_cookbook.renderers.chatml import LineSeparated
from tinker_cookbook.renderers.core.checks import TEXT_AND_IMAGES, text_of
from tinker_cookbook.renderers.core.images import content_segments, encode_segments
from tinker_cookbook.renderers.core.messages import Message, Role, ensure_list
from tinker_cookbook.renderers.core.parsing import MessageReader
from tinker_cookbook.renderers.core.rendered import RenderContext, RenderedMessage, token_list
from tinker_cookbook.renderers.template.renderer import TemplateReader

_END = "<end_of_utterance>"


@dataclass(eq=False, repr=False, kw_only=True)
class SmolVLMRenderer(LineSeparated):
    """SmolVLM dialogue with images in messages of users; the tokens around an image's tiles are
    part of the image. ``max_image_size`` limits the longest side in pixels, 0 does not."""

    max_image_size: int = 0

    _encodes_with_codec = True
    _history_as_sampled = True
    stop_token = _END
    _bos: ClassVar[str] = "<|im_start|>"
    _special_tokens = ("<image>", "<fake_token_around_image>", "<global-img>")
    _roles = ("system", "user", "assistant")
    _context_parts = TEXT_AND_IMAGES

    def _header(self, role: Role) -> str:
        return f"{role.capitalize()}:"

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Returns the role and a colon as header, and the text and its end as output."""
        self._check(message, ctx.idx)
        header = self._begin(message["role"], ctx)
        if message["role"] == "assistant":
            text = text_of(message, ctx.idx, self._name)
            output = [self.codec.encode(f" {text}{_END}")]
            return RenderedMessage(header=self.codec.constant(header), output=output)
        segments = content_segments(message, ctx.idx, self, ("", ""), self.max_image_size)
        first = next(iter(ensure_list(message["content"])), None)
        space = "" if first is not None and first["type"] == "image" else " "
        begin, *rest = encode_segments([header + space, *segments, _END], self.codec.encode)
        tokens, border = token_list(begin), len(self.codec.constant(header))
        return RenderedMessage(header=tokens[:border], output=[tokens[border:], *rest])

    def _reader(self) -> MessageReader:
        return TemplateReader((), None, " ")


class Idefics3Renderer(SmolVLMRenderer):
    """Idefics3, which is built on Llama 3."""

    _bos = "<|begin_of_text|>"
