"""Kimi K2.6 with the thinking of every answer; otherwise the formats of K2.5."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinker_cookbook.renderers.kimi_k25 import KimiK25Renderer


@dataclass(eq=False, repr=False, kw_only=True)
class KimiK26PreserveThinkingRenderer(KimiK25Renderer):
    """Kimi K2.6 with ``preserve_thinking=true``: the extension property holds."""

    strip_thinking_from_history: bool = field(default=False, init=False)
