"""Renderers: messages to tokens with training weights, and sampled tokens back to messages.

``get_renderer(name, tokenizer)`` makes one; a chat format is one file of this package.
"""

from __future__ import annotations

from tinker_cookbook.renderers import base
from tinker_cookbook.renderers.base import *  # noqa: F403
from tinker_cookbook.renderers.core.chatml import ChatMLRenderer
from tinker_cookbook.renderers.deepseek_v3 import (
    DeepSeekV3DisableThinkingRenderer,
    DeepSeekV3Renderer,
    DeepSeekV3ThinkingRenderer,
)
from tinker_cookbook.renderers.deepseek_v3_2 import (
    DeepSeekV32Renderer,
    DeepSeekV32ThinkingRenderer,
)
from tinker_cookbook.renderers.gemma3 import Gemma3Renderer
from tinker_cookbook.renderers.glm4 import Glm46DisableThinkingRenderer, Glm46Renderer
from tinker_cookbook.renderers.gpt_oss import GptOssRenderer
from tinker_cookbook.renderers.kimi_k2 import KimiK2InstructRenderer, KimiK2Renderer
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
    Qwen3VLInstructRenderer,
    Qwen3VLRenderer,
)
from tinker_cookbook.renderers.qwen3_5 import Qwen3_5DisableThinkingRenderer, Qwen3_5Renderer
from tinker_cookbook.renderers.qwen3_8 import Qwen3_8DisableThinkingRenderer, Qwen3_8Renderer
from tinker_cookbook.renderers.registry import (
    check_renderer_name,
    get_registered_renderer_names,
    get_renderer,
    get_renderer_names,
    is_renderer_registered,
    register_renderer,
    unregister_renderer,
)
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from tinker_cookbook.renderers.template import TemplateRenderer
from tinker_cookbook.tokenizer_utils import Tokenizer

__all__ = [
    "ChatMLRenderer",
    "DeepSeekV32Renderer",
    "DeepSeekV32ThinkingRenderer",
    "DeepSeekV3DisableThinkingRenderer",
    "DeepSeekV3Renderer",
    "DeepSeekV3ThinkingRenderer",
    "Gemma3Renderer",
    "Glm46DisableThinkingRenderer",
    "Glm46Renderer",
    "GptOssRenderer",
    "KimiK2InstructRenderer",
    "KimiK2Renderer",
    "Llama3Renderer",
    "MistralRenderer",
    "Nemotron3DisableThinkingRenderer",
    "Nemotron3LowThinkingRenderer",
    "Nemotron3PreserveThinkingRenderer",
    "Nemotron3Renderer",
    "Nemotron3UltraDisableThinkingRenderer",
    "Nemotron3UltraMediumThinkingRenderer",
    "Nemotron3UltraPreserveThinkingRenderer",
    "Nemotron3UltraRenderer",
    "Qwen2_5Renderer",
    "Qwen3DisableThinkingRenderer",
    "Qwen3InstructRenderer",
    "Qwen3Renderer",
    "Qwen3VLInstructRenderer",
    "Qwen3VLRenderer",
    "Qwen3_5DisableThinkingRenderer",
    "Qwen3_5Renderer",
    "Qwen3_8DisableThinkingRenderer",
    "Qwen3_8Renderer",
    "RoleColonRenderer",
    "TemplateRenderer",
    "Tokenizer",
    "check_renderer_name",
    "get_registered_renderer_names",
    "get_renderer",
    "get_renderer_names",
    "is_renderer_registered",
    "register_renderer",
    "unregister_renderer",
]
__all__ += base.__all__
