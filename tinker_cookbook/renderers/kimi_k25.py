"""Kimi K2.5 and K2.6: K2 Thinking with images, and a prompt that opens the thinking block.

The prompts of ``kimi_k25`` and ``kimi_k26`` end with ``<think>``, with ``_disable_thinking`` in an
empty block. ``kimi_k26_preserve_thinking`` keeps the thinking of every answer. Tools are declared
as TypeScript types.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.renderers.core.checks import TEXT_AND_IMAGES
from tinker_cookbook.renderers.core.images import Segments, content_segments
from tinker_cookbook.renderers.core.messages import Message, ToolSpec, system_message
from tinker_cookbook.renderers.core.rendered import RenderContext
from tinker_cookbook.renderers.core.tool_calls import as_openai_tool
from tinker_cookbook.renderers.kimi_k2 import DECLARE, KIMI_THINKING, KimiK2Renderer
from tinker_cookbook.renderers.kimi_k2_5_tool_declaration_ts import encode_tools_to_typescript_style

_AROUND_IMAGE = ("<|media_begin|>image<|media_content|>", "<|media_end|>\n")


class KimiK25Renderer(KimiK2Renderer):
    """Kimi K2.5 and K2.6 with thinking and images."""

    _context_parts = TEXT_AND_IMAGES
    _inside = KIMI_THINKING
    _prompt_opening = "<think>"

    def _declare_tools(self, tools: Sequence[ToolSpec], system_prompt: str) -> list[Message]:
        """Declares tools as TypeScript types in a separate message."""
        declared = encode_tools_to_typescript_style([as_openai_tool(tool) for tool in tools])
        messages = [Message(role=DECLARE, content=declared)] if declared else []
        return messages + system_message(system_prompt)

    def _segments(self, message: Message, idx: int) -> Segments:
        return content_segments(message, idx, self, _AROUND_IMAGE)


class KimiK25DisableThinkingRenderer(KimiK25Renderer):
    """Kimi K2.5 and K2.6 without thinking.

    Thinking in a trained answer raises RendererError; in history it is dropped.
    """

    _inside = None
    _prompt_opening = "<think></think>"
    disables_thinking = True

    def _thinking_and_text(self, message: Message, ctx: RenderContext) -> str:
        text = super()._thinking_and_text(message, ctx)
        # The prompt has the empty block; a model may think all the same.
        opening = self._prompt_opening
        return text if text.startswith(opening) else opening + text
