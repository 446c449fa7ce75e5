"""Qwen3-VL: Qwen3 with images in questions and in results of tools.

``qwen3_vl`` writes the format of the Thinking models: as Qwen3's, but the prompt already opens the
``<think>`` block. ``qwen3_vl_instruct`` writes that of the Instruct models, which know no thinking.
"""

from __future__ import annotations

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.blocks import BlockReader
from tinker_cookbook.renderers.chatml import START
from tinker_cookbook.renderers.content import ensure_list
from tinker_cookbook.renderers.images import ImageProcessorProtocol, Segments, content_segments
from tinker_cookbook.renderers.messages import Message, Role
from tinker_cookbook.renderers.qwen3 import THINKING, Qwen3InstructRenderer, Qwen3Renderer
from tinker_cookbook.renderers.rendered import RenderContext, RenderedMessage
from tinker_cookbook.renderers.streaming import MessageReader
from tinker_cookbook.renderers.tool_calls import JSON_CALL
from tinker_cookbook.tokenizer_utils import Tokenizer

AROUND_IMAGE = ("<|vision_start|>", "<|vision_end|>")
_MAY_SHOW_IMAGES = ("user", "tool")


class _WithImages(Qwen3InstructRenderer):
    """Images in messages of users and tools."""

    max_image_size: int = 0

    def _allowed_parts(self, role: Role) -> frozenset[str]:
        return self._parts | {"image"} if role in _MAY_SHOW_IMAGES else self._parts

    def _content(self, message: Message, ctx: RenderContext) -> Segments:
        return content_segments(
            message, ctx.idx, self._name, self.image_processor, AROUND_IMAGE, self.max_image_size
        )


class Qwen3VLInstructRenderer(_WithImages):
    """Qwen3-VL-*-Instruct: images in messages of users and tools; tools; no thinking.

    Images need ``image_processor``. ``max_image_size`` bounds their longest side in pixels, 0
    leaves them as they are. A system message stands at the beginning only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: ImageProcessorProtocol | None = None,
        *,
        max_image_size: int = 0,
    ) -> None:
        super().__init__(tokenizer, image_processor)
        self.max_image_size = max_image_size

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """As Qwen3's, with images."""
        check_system_is_first(message, ctx, self._name)
        return super().render_message(message, ctx)


class Qwen3VLRenderer(_WithImages, Qwen3Renderer):
    """Qwen3-VL-*-Thinking: images in messages of users and tools; tools; thinking.

    ``strip_thinking_from_history`` as in Qwen3. Images need ``image_processor``;
    ``max_image_size`` bounds their longest side in pixels, 0 leaves them as they are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: ImageProcessorProtocol | None = None,
        *,
        strip_thinking_from_history: bool = True,
        max_image_size: int = 0,
    ) -> None:
        Qwen3Renderer.__init__(
            self,
            tokenizer,
            image_processor,
            strip_thinking_from_history=strip_thinking_from_history,
        )
        self.max_image_size = max_image_size

    def _question(self, message: Message) -> str:
        parts = ensure_list(message["content"])
        return "".join(part.get("text", AROUND_IMAGE[0]) for part in parts)

    def _generation_suffix(self, role: Role) -> list[int]:
        opening = "<think>\n" if role == "assistant" else ""
        return self.codec.constant(f"{START}{role}\n{opening}")

    def _answer_behind_block(self, thinking: str, text: str, ctx: RenderContext) -> RenderedMessage:
        if not (thinking or ctx.is_last):
            # The line breaks of an empty block are one token in history, as in the whole text.
            return self._answer(f"{START}assistant\n<think>\n\n</think>\n\n", text)
        return self._answer(f"{START}assistant\n<think>\n", text, f"{thinking}\n</think>\n\n")

    def _reader(self) -> MessageReader:
        return BlockReader((THINKING, JSON_CALL), inside=THINKING)


def check_system_is_first(message: Message, ctx: RenderContext, renderer: str) -> None:
    """Raises RendererError for a system message that is not the first message."""
    if message["role"] == "system" and ctx.idx:
        raise RendererError(
            f"messages[{ctx.idx}].role: got 'system', expected it at the beginning only: "
            f"{renderer} has no form for it elsewhere; join it with messages[0]"
        )
