"""Kimi K2.6 with the thinking of every answer; its other formats are those of K2.5."""

from __future__ import annotations

from tinker_cookbook.renderers.core.images import ImageProcessorProtocol
from tinker_cookbook.renderers.kimi_k2 import KIMI_SYSTEM_PROMPT
from tinker_cookbook.renderers.kimi_k25 import KimiK25Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer


class KimiK26PreserveThinkingRenderer(KimiK25Renderer):
    """Kimi K2.6 with ``preserve_thinking=true``: the extension property holds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        image_processor: ImageProcessorProtocol | None = None,
        *,
        default_system: str = KIMI_SYSTEM_PROMPT,
    ) -> None:
        super().__init__(
            tokenizer,
            image_processor,
            default_system=default_system,
            strip_thinking_from_history=False,
        )
