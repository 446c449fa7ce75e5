"""The names of renderers: each is a family's renderer with its options set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.chatml import ChatMLRenderer, smollm2
from tinker_cookbook.renderers.deepseek_v3 import deepseek_v3, deepseek_v3_thinking
from tinker_cookbook.renderers.deepseek_v3_2 import (
    DeepSeekV32Renderer,
    DeepSeekV32ThinkingRenderer,
)
from tinker_cookbook.renderers.gemma3 import Gemma3Renderer
from tinker_cookbook.renderers.glm4 import Glm46DisableThinkingRenderer, Glm46Renderer
from tinker_cookbook.renderers.gpt_oss import gpt_oss
from tinker_cookbook.renderers.kimi_k2 import KimiK2InstructRenderer, KimiK2Renderer
from tinker_cookbook.renderers.kimi_k25 import KimiK25DisableThinkingRenderer, KimiK25Renderer
from tinker_cookbook.renderers.kimi_k26 import KimiK26PreserveThinkingRenderer
from tinker_cookbook.renderers.llama3 import Llama3Renderer
from tinker_cookbook.renderers.mistral import MistralRenderer
from tinker_cookbook.renderers.nemotron3 import (
    Nemotron3DisableThinkingRenderer,
    Nemotron3LowThinkingRenderer,
    Nemotron3PreserveThinkingRenderer,
    Nemotron3Renderer,
    Nemotron3UltraDisableThinkingRenderer,
    Nemotron3UltraMediumThinkingRenderer,
    Nemotron3UltraPreserveThinkingRenderer,
    Nemotron3UltraRenderer,
)
from tinker_cookbook.renderers.qwen2_5 import Qwen2_5Renderer
from tinker_cookbook.renderers.qwen3 import (
    Qwen3DisableThinkingRenderer,
    Qwen3InstructRenderer,
    Qwen3Renderer,
)
from tinker_cookbook.renderers.qwen3_5 import Qwen3_5DisableThinkingRenderer, Qwen3_5Renderer
from tinker_cookbook.renderers.qwen3_8 import Qwen3_8DisableThinkingRenderer, Qwen3_8Renderer
from tinker_cookbook.renderers.qwen3_vl import Qwen3VLInstructRenderer, Qwen3VLRenderer
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.renderers.template import TemplateRenderer

RendererFactory: TypeAlias = Callable[..., Renderer]
"""``factory(tokenizer, image_processor, **options)``; its keyword-only arguments are options."""

BUILT_IN: dict[str, RendererFactory] = {
    "role_colon": RoleColonRenderer,
    "template": TemplateRenderer,
    "chatml": ChatMLRenderer,
    "smollm2": smollm2,
    "llama3": Llama3Renderer,
    "deepseekv3": deepseek_v3,
    "deepseekv3_disable_thinking": deepseek_v3,
    "deepseekv3_thinking": deepseek_v3_thinking,
    "deepseekv3_2": DeepSeekV32Renderer,
    "deepseekv3_2_thinking": DeepSeekV32ThinkingRenderer,
    "kimi_k2": KimiK2Renderer,
    "kimi_k2_instruct": KimiK2InstructRenderer,
    "kimi_k25": KimiK25Renderer,
    "kimi_k25_disable_thinking": KimiK25DisableThinkingRenderer,
    "kimi_k26": KimiK25Renderer,
    "kimi_k26_disable_thinking": KimiK25DisableThinkingRenderer,
    "kimi_k26_preserve_thinking": KimiK26PreserveThinkingRenderer,
    "gemma3": Gemma3Renderer,
    "glm4_6": Glm46Renderer,
    "glm4_6_disable_thinking": Glm46DisableThinkingRenderer,
    "mistral": MistralRenderer,
    "nemotron3": Nemotron3Renderer,
    "nemotron3_low_thinking": Nemotron3LowThinkingRenderer,
    "nemotron3_preserve_thinking": Nemotron3PreserveThinkingRenderer,
    "nemotron3_disable_thinking": Nemotron3DisableThinkingRenderer,
    "nemotron3_ultra": Nemotron3UltraRenderer,
    "nemotron3_ultra_medium_thinking": Nemotron3UltraMediumThinkingRenderer,
    "nemotron3_ultra_preserve_thinking": Nemotron3UltraPreserveThinkingRenderer,
    "nemotron3_ultra_disable_thinking": Nemotron3UltraDisableThinkingRenderer,
    "qwen2_5": Qwen2_5Renderer,
    "qwen3": Qwen3Renderer,
    "qwen3_disable_thinking": Qwen3DisableThinkingRenderer,
    "qwen3_instruct": Qwen3InstructRenderer,
    "gpt_oss_no_sysprompt": partial(gpt_oss, use_system_prompt=False),
    "gpt_oss_low_reasoning": partial(gpt_oss, reasoning_effort="low"),
    "gpt_oss_medium_reasoning": partial(gpt_oss, reasoning_effort="medium"),
    "gpt_oss_high_reasoning": partial(gpt_oss, reasoning_effort="high"),
    "qwen3_vl": Qwen3VLRenderer,
    "qwen3_vl_instruct": Qwen3VLInstructRenderer,
    "qwen3_5": Qwen3_5Renderer,
    "qwen3_5_disable_thinking": Qwen3_5DisableThinkingRenderer,
    "qwen3_5_preserve_thinking": partial(Qwen3_5Renderer, strip_thinking_from_history=False),
    "qwen3_8_xhigh_reasoning": Qwen3_8Renderer,
    "qwen3_8_medium_reasoning": partial(Qwen3_8Renderer, reasoning_effort="medium"),
    "qwen3_8_low_reasoning": partial(Qwen3_8Renderer, reasoning_effort="low"),
    "qwen3_8_disable_thinking": Qwen3_8DisableThinkingRenderer,
}

_LEVELS = ("max", "high", "low")
UNAVAILABLE: dict[str, str] = {
    "deepseekv4_1": "DeepSeek V4.1",
    **{f"deepseekv4_1_{level}_reasoning": "DeepSeek V4.1" for level in ("low", "max")},
    "deepseekv4_1_disable_thinking": "DeepSeek V4.1",
    "deepseekv4_1_preserve_thinking": "DeepSeek V4.1",
    **{f"kimi_k31_pro_{level}_reasoning": "Kimi K3.1-Pro" for level in _LEVELS},
    "kimi_k31_pro_disable_thinking": "Kimi K3.1-Pro",
    "kimi_k31_pro_no_reasoning_effort": "Kimi K3.1-Pro",
    **{f"glm5_3_{level}_reasoning": "GLM-5.3" for level in _LEVELS},
    "tml_v0": "Inkling",
}
"""Public names without a renderer here, with the model: none has been checked against the model's
own chat template, which could not be had for most of them."""
