"""Models of the hosted Tinker service, with the values from its cookbook.

One row has everything that is known about a model from its name: version, size, renderers,
hidden size, and the parameters of a rank-1 LoRA adapter as the service measures them. In a mixture
of experts the service shares the factor at the hidden dimension among the experts of a layer, so
an expert layer counts ``hidden + experts · intermediate`` for each of its three matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BASE = ("role_colon",)
LLAMA3 = ("llama3",)
QWEN3 = ("qwen3", "qwen3_disable_thinking")
QWEN3_INSTRUCT = ("qwen3_instruct",)
QWEN3_VL_INSTRUCT = ("qwen3_vl_instruct",)
QWEN3_5 = ("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking")
QWEN3_8 = (
    "qwen3_8_xhigh_reasoning",
    "qwen3_8_disable_thinking",
    "qwen3_8_medium_reasoning",
    "qwen3_8_low_reasoning",
)
DEEPSEEK_V3 = ("deepseekv3", "deepseekv3_thinking")
DEEPSEEK_V4_1 = (
    "deepseekv4_1",
    "deepseekv4_1_low_reasoning",
    "deepseekv4_1_max_reasoning",
    "deepseekv4_1_disable_thinking",
    "deepseekv4_1_preserve_thinking",
)
GPT_OSS = ("gpt_oss_no_sysprompt", "gpt_oss_medium_reasoning")
KIMI_K2 = ("kimi_k2",)
KIMI_K2_5 = ("kimi_k25", "kimi_k25_disable_thinking")
KIMI_K2_6 = ("kimi_k26", "kimi_k26_disable_thinking", "kimi_k26_preserve_thinking")
KIMI_K3_1 = (
    "kimi_k31_pro_max_reasoning",
    "kimi_k31_pro_high_reasoning",
    "kimi_k31_pro_low_reasoning",
    "kimi_k31_pro_disable_thinking",
    "kimi_k31_pro_no_reasoning_effort",
)
UNAVAILABLE = dict.fromkeys(KIMI_K3_1, "Kimi K3.1-Pro")
"""Public names without a renderer, with their model, whose tokenizer only versions of tml-renderers
have that are not on PyPI."""
GLM_5_3 = ("glm5_3_max_reasoning", "glm5_3_low_reasoning", "glm5_3_high_reasoning")
NEMOTRON3 = ("nemotron3", "nemotron3_disable_thinking", "nemotron3_preserve_thinking")
NEMOTRON3_SUPER = (*NEMOTRON3, "nemotron3_low_thinking")
NEMOTRON3_ULTRA = (
    "nemotron3_ultra",
    "nemotron3_ultra_disable_thinking",
    "nemotron3_ultra_medium_thinking",
    "nemotron3_ultra_preserve_thinking",
)
NEMOTRON3_LIGHTNING = tuple(name for name in NEMOTRON3_ULTRA if "medium" not in name)
INKLING = ("tml_v0",)


@dataclass(frozen=True)
class LineupModel:
    """A hosted model. ``lora`` is the size of a rank-1 adapter on (MLP, attention, unembedding)."""

    name: str
    version: str
    size: str
    renderers: tuple[str, ...]
    hidden: int
    lora: tuple[int, int, int]
    is_vl: bool = False
    is_audio_in: bool = False

    @property
    def organization(self) -> str:
        """Part of the name before the slash."""
        return self.name.partition("/")[0]

    @property
    def is_chat(self) -> bool:
        """Whether the model was tuned to chat: base models get the plain-text renderer."""
        return self.renderers != BASE


_M = LineupModel
_LLAMA_8B = (4096, (1_769_472, 851_968, 132_352))
_LLAMA_70B = (8192, (8_847_360, 4_096_000, 136_448))
_QWEN3_8B = (4096, (1_769_472, 958_464, 156_032))
_QWEN3_30B = (2048, (14_450_688, 835_584, 153_984))
_QWEN3_235B = (4096, (56_598_528, 3_176_448, 156_032))
_QWEN3_5_9B = (4096, (1_572_864, 1_130_496, 252_416))
_QWEN3_5_27B = (5120, (4_325_376, 2_965_504, 253_440))
_QWEN3_5_35B = (2048, (16_281_600, 1_013_760, 250_368))
_DEEPSEEK_V3_1 = (7168, (94_307_328, 2_440_000, 136_448))
_DEEPSEEK_FLASH = (5120, (107_673_600, 1_013_760, 134_400))
_KIMI_1T = (7168, (144_583_680, 1_940_288, 171_008))
_NEMOTRON_30B = (2688, (11_346_176, 584_832, 133_760))
_NEMOTRON_120B = (4096, (111_349_760, 1_675_264, 135_168))

_ROWS = (
    _M("meta-llama/Llama-3.1-8B-Instruct", "3.1", "8B", LLAMA3, *_LLAMA_8B),
    _M("meta-llama/Llama-3.2-1B", "3.2", "1B", BASE, 2048, (491_520, 212_992, 130_304)),
    _M("meta-llama/Llama-3.2-3B", "3.2", "3B", BASE, 3072, (946_176, 573_440, 131_328)),
    _M("meta-llama/Llama-3.1-8B", "3.1", "8B", BASE, *_LLAMA_8B),
    _M("meta-llama/Llama-3.1-70B", "3.1", "70B", BASE, *_LLAMA_70B),
    _M("meta-llama/Llama-3.3-70B-Instruct", "3.3", "70B", LLAMA3, *_LLAMA_70B),
    _M(
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "3",
        "30B-A3B",
        QWEN3_VL_INSTRUCT,
        *_QWEN3_30B,
        is_vl=True,
    ),
    _M(
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
        "3",
        "235B-A22B",
        QWEN3_VL_INSTRUCT,
        *_QWEN3_235B,
        is_vl=True,
    ),
    _M("Qwen/Qwen3-8B-Base", "3", "8B", BASE, *_QWEN3_8B),
    _M("Qwen/Qwen3-30B-A3B-Base", "3", "30B-A3B", BASE, *_QWEN3_30B),
    _M("Qwen/Qwen3-8B", "3", "8B", QWEN3, *_QWEN3_8B),
    _M("Qwen/Qwen3-32B", "3", "32B", QWEN3, 5120, (5_898_240, 2_490_368, 157_056)),
    _M("Qwen/Qwen3-30B-A3B", "3", "30B-A3B", QWEN3, *_QWEN3_30B),
    _M(
        "Qwen/Qwen3-4B-Instruct-2507",
        "3",
        "4B",
        QWEN3_INSTRUCT,
        2560,
        (1_327_104, 737_280, 154_496),
    ),
    _M("Qwen/Qwen3-30B-A3B-Instruct-2507", "3", "30B-A3B", QWEN3_INSTRUCT, *_QWEN3_30B),
    _M("Qwen/Qwen3-235B-A22B-Instruct-2507", "3", "235B-A22B", QWEN3_INSTRUCT, *_QWEN3_235B),
    _M("Qwen/Qwen3.5-4B", "3.5", "4B", QWEN3_5, 2560, (1_130_496, 897_024, 250_880), is_vl=True),
    _M("Qwen/Qwen3.5-9B", "3.5", "9B", QWEN3_5, *_QWEN3_5_9B, is_vl=True),
    _M("Qwen/Qwen3.5-9B-Base", "3.5", "9B", BASE, *_QWEN3_5_9B, is_vl=True),
    _M("Qwen/Qwen3.5-27B", "3.5", "27B", QWEN3_5, *_QWEN3_5_27B, is_vl=True),
    _M("Qwen/Qwen3.5-35B-A3B", "3.5", "35B-A3B", QWEN3_5, *_QWEN3_5_35B, is_vl=True),
    _M("Qwen/Qwen3.5-35B-A3B-Base", "3.5", "35B-A3B", BASE, *_QWEN3_5_35B, is_vl=True),
    _M(
        "Qwen/Qwen3.5-397B-A17B",
        "3.5",
        "397B-A17B",
        QWEN3_5,
        4096,
        (96_030_720, 2_841_600, 252_416),
        is_vl=True,
    ),
    _M("Qwen/Qwen3.6-27B", "3.6", "27B", QWEN3_5, *_QWEN3_5_27B, is_vl=True),
    _M("Qwen/Qwen3.6-35B-A3B", "3.6", "35B-A3B", QWEN3_5, *_QWEN3_5_35B, is_vl=True),
    _M("Qwen/Qwen3.8-27B", "3.8", "27B", QWEN3_8, *_QWEN3_5_27B, is_vl=True),
    _M("deepseek-ai/DeepSeek-V3.1", "3", "671B-A37B", DEEPSEEK_V3, *_DEEPSEEK_V3_1),
    _M("deepseek-ai/DeepSeek-V3.1-Base", "3", "671B-A37B", BASE, *_DEEPSEEK_V3_1),
    _M("deepseek-ai/DeepSeek-V4.1-Flash", "4.1", "552B-A16B", DEEPSEEK_V4_1, *_DEEPSEEK_FLASH),
    _M("deepseek-ai/DeepSeek-V4.1-Flash-1017", "4.1", "552B-A16B", DEEPSEEK_V4_1, *_DEEPSEEK_FLASH),
    _M("openai/gpt-oss-20b", "1", "21B-A3.6B", GPT_OSS, 2880, (6_842_880, 497_664, 203_968)),
    _M("openai/gpt-oss-120b", "1", "117B-A5.1B", GPT_OSS, 2880, (40_124_160, 746_496, 203_968)),
    _M("moonshotai/Kimi-K2-Thinking", "K2", "1T-A32B", KIMI_K2, *_KIMI_1T),
    _M("moonshotai/Kimi-K2.5", "K2.5", "1T-A32B", KIMI_K2_5, *_KIMI_1T, is_vl=True),
    _M("moonshotai/Kimi-K2.6", "K2.6", "1T-A32B", KIMI_K2_6, *_KIMI_1T, is_vl=True),
    _M(
        "moonshotai/Kimi-K3.1-Pro",
        "K3.1",
        "2.8T-A104B",
        KIMI_K3_1,
        7168,
        (766_457_856, 8_040_960, 171_008),
        is_vl=True,
    ),
    _M("zai-org/GLM-5.3", "5.3", "744B-A40B", GLM_5_3, 6144, (121_356_288, 2_920_320, 161_024)),
    _M(
        "zai-org/GLM-5.3-Flash",
        "5.3",
        "320B-A18B",
        GLM_5_3,
        4096,
        (75_755_520, 2_009_088, 158_976),
    ),
    _M("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "3", "30B-A3B", NEMOTRON3, *_NEMOTRON_30B),
    _M(
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        "3",
        "120B-A12B",
        NEMOTRON3_SUPER,
        *_NEMOTRON_120B,
    ),
    _M(
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        "3",
        "550B-A55B",
        NEMOTRON3_ULTRA,
        8192,
        (254_529_536, 4_134_912, 139_264),
    ),
    _M(
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
        "3.5",
        "30B-A3B",
        NEMOTRON3_LIGHTNING,
        *_NEMOTRON_30B,
    ),
    _M(
        "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
        "3.5",
        "120B-A12B",
        NEMOTRON3_ULTRA,
        *_NEMOTRON_120B,
        is_vl=True,
    ),
    _M(
        "thinkingmachines/Inkling",
        "1",
        "975B-A41B",
        INKLING,
        6144,
        (154_705_920, 3_424_256, 207_168),
        is_vl=True,
        is_audio_in=True,
    ),
    _M(
        "thinkingmachines/Inkling-Small",
        "1",
        "276B-A12B",
        INKLING,
        4096,
        (64_503_808, 1_311_744, 205_120),
        is_vl=True,
        is_audio_in=True,
    ),
    _M(
        "thinkingmachines/Inkling-2-Small",
        "2",
        "594B-A17B",
        INKLING,
        4608,
        (128_065_536, 2_347_008, 205_632),
        is_vl=True,
    ),
)

LINEUP: dict[str, LineupModel] = {row.name: row for row in _ROWS}

# Models that are no longer hosted, with the shape of one that is.
_SAME_SHAPE = {"deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-V3.1"}


def hosted_shape(model_name: str) -> LineupModel | None:
    """Returns the hosted model with the shape of ``model_name``, ``None`` if there is none.

    The organization may be missing (``DeepSeek-V3.1``), unless a local folder has this name.
    """
    name = _SAME_SHAPE.get(model_name, model_name)
    if "/" not in name and not Path(name).exists():
        name = next((full for full in LINEUP if full.endswith(f"/{name}")), name)
    return LINEUP.get(name)
