"""The names of renderers: each is a family's renderer with its options set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.chatml import ChatMLRenderer, smollm2
from tinker_cookbook.renderers.llama3 import Llama3Renderer
from tinker_cookbook.renderers.qwen3 import (
    Qwen3DisableThinkingRenderer,
    Qwen3InstructRenderer,
    Qwen3Renderer,
)
from tinker_cookbook.renderers.role_colon import RoleColonRenderer

RendererFactory: TypeAlias = Callable[..., Renderer]
"""``factory(tokenizer, image_processor, **options)``; its keyword-only arguments are options."""

BUILT_IN: dict[str, RendererFactory] = {
    "role_colon": RoleColonRenderer,
    "chatml": ChatMLRenderer,
    "smollm2": smollm2,
    "llama3": Llama3Renderer,
    "qwen3": Qwen3Renderer,
    "qwen3_disable_thinking": Qwen3DisableThinkingRenderer,
    "qwen3_instruct": Qwen3InstructRenderer,
}

_LEVELS = ("max", "high", "low")
UNAVAILABLE: dict[str, str] = {
    **{f"qwen3_8_{level}_reasoning": "Qwen3.8" for level in ("xhigh", "medium", "low")},
    "qwen3_8_disable_thinking": "Qwen3.8",
    "deepseekv4_1": "DeepSeek V4.1",
    **{f"deepseekv4_1_{level}_reasoning": "DeepSeek V4.1" for level in ("low", "max")},
    "deepseekv4_1_disable_thinking": "DeepSeek V4.1",
    "deepseekv4_1_preserve_thinking": "DeepSeek V4.1",
    "kimi_k25": "Kimi K2.5",
    "kimi_k25_disable_thinking": "Kimi K2.5",
    "kimi_k26": "Kimi K2.6",
    "kimi_k26_disable_thinking": "Kimi K2.6",
    "kimi_k26_preserve_thinking": "Kimi K2.6",
    **{f"kimi_k31_pro_{level}_reasoning": "Kimi K3.1-Pro" for level in _LEVELS},
    "kimi_k31_pro_disable_thinking": "Kimi K3.1-Pro",
    "kimi_k31_pro_no_reasoning_effort": "Kimi K3.1-Pro",
    "nemotron3_ultra": "Nemotron 3 Ultra",
    "nemotron3_ultra_disable_thinking": "Nemotron 3 Ultra",
    "nemotron3_ultra_medium_thinking": "Nemotron 3 Ultra",
    "nemotron3_ultra_preserve_thinking": "Nemotron 3 Ultra",
    **{f"glm5_3_{level}_reasoning": "GLM-5.3" for level in _LEVELS},
    "tml_v0": "Inkling",
}
"""Public names without a renderer here, with the model: no chat template of it could be had, so
no tokens could be compared with it."""
