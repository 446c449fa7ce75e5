"""The table of facts about models: each model or family is stated here, and nowhere else.

* ``FAMILIES``: what follows from a name: organization, version, renderers. A fine-tune or a local
  folder that keeps the pattern of its family has the facts of its family.
* ``TEMPLATE_RULES`` and ``VISION_TYPES``: what follows from the files of a model whose name is
  unknown.
* ``shape_of``: sizes of decoders.
* ``LINEUP``: the models of the hosted Tinker service, with the values from its cookbook: what does
  not follow from their name and shape.

``model_info``, ``model_files`` and ``hyperparam_utils`` look up facts in this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinker_cookbook.model_shapes import ModelShape

# Names of renderers that fit a family, the best first.
BASE = ("role_colon",)
TEMPLATE = ("template",)
_LLAMA3 = ("llama3",)
_QWEN3 = ("qwen3", "qwen3_disable_thinking")
_QWEN3_INSTRUCT = ("qwen3_instruct",)
_QWEN3_VL_INSTRUCT = ("qwen3_vl_instruct",)
_QWEN3_5 = ("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking")
_QWEN3_8 = (
    "qwen3_8_xhigh_reasoning",
    "qwen3_8_disable_thinking",
    "qwen3_8_medium_reasoning",
    "qwen3_8_low_reasoning",
)
_DEEPSEEK_V3 = ("deepseekv3", "deepseekv3_thinking")
_DEEPSEEK_V31 = (*_DEEPSEEK_V3, "deepseekv3_disable_thinking")
_DEEPSEEK_V4_1 = (
    "deepseekv4_1",
    "deepseekv4_1_low_reasoning",
    "deepseekv4_1_max_reasoning",
    "deepseekv4_1_disable_thinking",
    "deepseekv4_1_preserve_thinking",
)
_GPT_OSS = ("gpt_oss_no_sysprompt", "gpt_oss_medium_reasoning")
_GPT_OSS_ALL = (*_GPT_OSS, "gpt_oss_low_reasoning", "gpt_oss_high_reasoning")
_KIMI_K2_5 = ("kimi_k25", "kimi_k25_disable_thinking")
_KIMI_K2_6 = ("kimi_k26", "kimi_k26_disable_thinking", "kimi_k26_preserve_thinking")
_KIMI_K3_1 = (
    "kimi_k31_pro_max_reasoning",
    "kimi_k31_pro_high_reasoning",
    "kimi_k31_pro_low_reasoning",
    "kimi_k31_pro_disable_thinking",
    "kimi_k31_pro_no_reasoning_effort",
)
UNAVAILABLE = dict.fromkeys(_KIMI_K3_1, "Kimi K3.1-Pro")
"""Public names without a renderer, with their model, whose tokenizer only versions of tml-renderers
have that are not on PyPI."""
_GLM_5_3 = ("glm5_3_max_reasoning", "glm5_3_low_reasoning", "glm5_3_high_reasoning")
_NEMOTRON3 = ("nemotron3", "nemotron3_disable_thinking", "nemotron3_preserve_thinking")
_NEMOTRON3_SUPER = (*_NEMOTRON3, "nemotron3_low_thinking")
_NEMOTRON3_ULTRA = (
    "nemotron3_ultra",
    "nemotron3_ultra_disable_thinking",
    "nemotron3_ultra_medium_thinking",
    "nemotron3_ultra_preserve_thinking",
)
_NEMOTRON3_LIGHTNING = tuple(name for name in _NEMOTRON3_ULTRA if "medium" not in name)
_MISTRAL = ("mistral", *TEMPLATE)


@dataclass(frozen=True)
class Family:
    """A rule. ``pattern`` matches the last part of the name, in lower case, from its start; its
    group ``version`` is used instead of ``version``."""

    pattern: str
    organization: str
    version: str
    renderers: tuple[str, ...]
    is_vl: bool = False
    is_audio_in: bool = False
    size: str = ""


# The first rule that matches is used, so special rules come before general ones.
FAMILIES = (
    Family(r"(meta-)?llama-?(?P<version>3(\.\d)?)-.*instruct", "meta-llama", "3", _LLAMA3),
    # Llama 3.3 was only released as a chat model, so the name without "Instruct" means the same.
    Family(r"(meta-)?llama-?3\.3-70b", "meta-llama", "3.3", _LLAMA3),
    Family(r"(meta-)?llama-?(?P<version>3(\.\d)?)-", "meta-llama", "3", BASE),
    Family(r"qwen3-vl-.*instruct", "Qwen", "3", _QWEN3_VL_INSTRUCT, is_vl=True),
    Family(r"qwen3-vl-", "Qwen", "3", ("qwen3_vl",), is_vl=True),
    Family(r"qwen(?P<version>3\.\d)-.*base", "Qwen", "3.5", BASE, is_vl=True),
    Family(r"qwen(?P<version>[23](\.\d)?)-.*base", "Qwen", "3", BASE),
    Family(r"qwen3-coder", "Qwen", "3", TEMPLATE),
    Family(r"qwen3-.*instruct", "Qwen", "3", _QWEN3_INSTRUCT),
    # The prompt always opens the thinking block, which the qwen3 renderer leaves to the model.
    Family(r"qwen3-.*thinking", "Qwen", "3", TEMPLATE),
    Family(r"qwen3-", "Qwen", "3", _QWEN3),
    Family(r"qwen3\.8-", "Qwen", "3.8", _QWEN3_8, is_vl=True),
    Family(r"qwen3\.6-", "Qwen", "3.6", _QWEN3_5, is_vl=True),
    Family(r"qwen3\.5-", "Qwen", "3.5", _QWEN3_5, is_vl=True),
    Family(r"qwen2\.5-vl-", "Qwen", "2.5", ("qwen2_5_vl",), is_vl=True),
    Family(r"smolvlm2?-", "HuggingFaceTB", "", ("smolvlm",), is_vl=True),
    Family(r"idefics3-", "HuggingFaceM4", "3", ("idefics3",), is_vl=True),
    # The default system prompt differs from that of the qwen2_5 renderer.
    Family(r"qwen2\.5-math-.*instruct", "Qwen", "2.5", TEMPLATE),
    Family(r"qwen2\.5-.*instruct", "Qwen", "2.5", ("qwen2_5", "chatml")),
    Family(r"qwen2\.5-", "Qwen", "2.5", BASE),
    Family(r"deepseek-v4\.1", "deepseek-ai", "4.1", _DEEPSEEK_V4_1),
    Family(r"deepseek-v(?P<version>3(\.\d)?).*base", "deepseek-ai", "3", BASE),
    # V3.2-Exp calls tools in the form of V3.1.
    Family(r"deepseek-v3\.2-exp", "deepseek-ai", "3.2", _DEEPSEEK_V31),
    Family(r"deepseek-v3\.2", "deepseek-ai", "3.2", TEMPLATE),
    Family(r"deepseek-v3\.1", "deepseek-ai", "3.1", _DEEPSEEK_V31),
    Family(r"deepseek-v3(?!\.)", "deepseek-ai", "3", TEMPLATE),
    Family(r"deepseek-r1(?!-distill)", "deepseek-ai", "R1", TEMPLATE),
    Family(r"deepseek-r1-distill", "deepseek-ai", "R1", TEMPLATE),
    Family(r"gpt-oss-", "openai", "1", _GPT_OSS_ALL),
    Family(r"kimi-k2\.5", "moonshotai", "K2.5", _KIMI_K2_5, is_vl=True),
    Family(r"kimi-k2\.6", "moonshotai", "K2.6", _KIMI_K2_6, is_vl=True),
    Family(r"kimi-k3\.1", "moonshotai", "K3.1", _KIMI_K3_1, is_vl=True),
    Family(r"kimi-k2-base", "moonshotai", "K2", BASE),
    Family(r"kimi-k2-instruct", "moonshotai", "K2", ("kimi_k2_instruct",), size="1T-A32B"),
    Family(r"kimi-k2", "moonshotai", "K2", ("kimi_k2",), size="1T-A32B"),
    Family(r"(nvidia-)?nemotron-3-ultra", "nvidia", "3", _NEMOTRON3_ULTRA),
    Family(r"(nvidia-)?nemotron-3\.5-lightning", "nvidia", "3.5", _NEMOTRON3_LIGHTNING),
    Family(r"(nvidia-)?nemotron-3\.5-", "nvidia", "3.5", _NEMOTRON3_ULTRA),
    Family(r"(nvidia-)?nemotron-3-.*base", "nvidia", "3", BASE),
    Family(r"(nvidia-)?nemotron-3", "nvidia", "3", _NEMOTRON3_SUPER),
    Family(r"glm-5\.3", "zai-org", "5.3", _GLM_5_3),
    Family(r"glm-4\.6", "zai-org", "4.6", ("glm4_6", "glm4_6_disable_thinking")),
    Family(r"inkling", "thinkingmachines", "", ("tml_v0",), is_vl=True, is_audio_in=True),
    Family(r"gemma-3-(270m|1b)-it", "google", "3", ("gemma3",)),
    Family(r"gemma-3-.*-it", "google", "3", ("gemma3",), is_vl=True),
    Family(r"gemma-3-(270m|1b)", "google", "3", BASE),
    Family(r"gemma-3-", "google", "3", BASE, is_vl=True),
    # Formats before v3 and after v7 have no renderer.
    Family(r"(mistral|mixtral-8x7b)-.*instruct-v0\.[12]", "mistralai", "", TEMPLATE),
    Family(r"mistral-small-3\.[2-9]-|ministral-3-|mistral-large-3-", "mistralai", "", TEMPLATE),
    Family(r"mistral-small-3\.1-.*instruct", "mistralai", "", _MISTRAL, is_vl=True),
    Family(r"mi[sx]tral-.*instruct|ministral-8b-instruct", "mistralai", "", _MISTRAL),
    Family(r"smollm2-.*instruct", "HuggingFaceTB", "2", ("smollm2", "chatml")),
    Family(r"smollm2-", "HuggingFaceTB", "2", BASE),
)


@dataclass(frozen=True)
class TemplateRule:
    """A rule on the chat template and the model type of a model with an unknown name."""

    family: str
    renderers: tuple[str, ...]
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    model_type: str = ""


_CHATML, _XML_CALLS, _IMAGES = "<|im_start|>", "<function=", "<|vision_start|>"
# In templates that think by default.
_CAN_DISABLE = "enable_thinking is false"
TEMPLATE_RULES = (
    TemplateRule(
        "Qwen3.6",
        # Qwen3.6 writes numbers, booleans and null in tool calls as JSON.
        ("qwen3_5?json_scalars=true", *_QWEN3_5[1:]),
        (_CHATML, _XML_CALLS, _CAN_DISABLE, "preserve_thinking"),
        ("reasoning_effort",),
        "qwen3_5",
    ),
    TemplateRule(
        "Qwen3.5",
        _QWEN3_5,
        (_CHATML, _XML_CALLS, _CAN_DISABLE),
        ("preserve_thinking", "reasoning_effort"),
        "qwen3_5",
    ),
    # Qwen3-2507 Thinking cannot disable thinking; its prompt opens the block.
    TemplateRule(
        "Qwen3", _QWEN3, (_CHATML, "<think>", _CAN_DISABLE), (_XML_CALLS, _IMAGES), "qwen3"
    ),
    TemplateRule(
        "Qwen3-2507 Instruct",
        _QWEN3_INSTRUCT,
        (_CHATML, "<tool_call>"),
        ("<think>", _XML_CALLS, _IMAGES),
        "qwen3",
    ),
    TemplateRule(
        "Qwen3-VL Thinking",
        ("qwen3_vl",),
        (_CHATML, "<think>", _IMAGES),
        (_XML_CALLS, _CAN_DISABLE),
        "qwen3_vl",
    ),
    TemplateRule(
        "Qwen3-VL Instruct",
        _QWEN3_VL_INSTRUCT,
        (_CHATML, "<tool_call>", _IMAGES),
        ("<think>", _XML_CALLS),
        "qwen3_vl",
    ),
    TemplateRule(
        "Qwen2.5-VL", ("qwen2_5_vl",), (_CHATML, _IMAGES), ("<tool_call>", "<think>"), "qwen2_5_vl"
    ),
    TemplateRule("SmolVLM", ("smolvlm",), (_CHATML, "<end_of_utterance>")),
    TemplateRule("Idefics3", ("idefics3",), ("<|begin_of_text|>", "<end_of_utterance>")),
    TemplateRule("SmolLM2", ("smollm2", "chatml"), (_CHATML, "named SmolLM"), ("<think>",)),
    TemplateRule(
        "Qwen2.5",
        ("qwen2_5", "chatml"),
        (_CHATML, "You are Qwen, created by Alibaba Cloud"),
        ("<think>",),
    ),
    TemplateRule(
        "ChatML", ("chatml",), (_CHATML,), ("<think>", "<tool_call>", _XML_CALLS, _IMAGES)
    ),
    TemplateRule("Llama 3", _LLAMA3, ("<|start_header_id|>",)),
    TemplateRule("Gemma 3", ("gemma3",), ("<start_of_turn>",), model_type="gemma3"),
)
# Processors of vision-language models may have the template in a file of their own, or none.
VISION_TYPES = {
    "qwen3_vl": _QWEN3_VL_INSTRUCT,
    "qwen2_vl": ("qwen2_5_vl",),
    "qwen2_5_vl": ("qwen2_5_vl",),
    "qwen3_5": _QWEN3_5,
    "smolvlm": ("smolvlm",),
    "idefics3": ("idefics3",),
    "gemma3": ("gemma3",),
}

_S = ModelShape
# Each row also holds for names that go on with a dash: Qwen3-4B-Base has the shape of Qwen3-4B.
SHAPES = {
    row.name: row
    for row in (
        _S("HuggingFaceTB/SmolLM2-135M", "llama", 30, 576, 1536, 9, 3, 64, 49_152, True),
        _S("HuggingFaceTB/SmolLM2-360M", "llama", 32, 960, 2560, 15, 5, 64, 49_152, True),
        _S("HuggingFaceTB/SmolLM2-1.7B", "llama", 24, 2048, 8192, 32, 32, 64, 49_152, True),
        _S("meta-llama/Llama-3.2-1B", "llama", 16, 2048, 8192, 32, 8, 64, 128_256, True),
        _S("meta-llama/Llama-3.2-3B", "llama", 28, 3072, 8192, 24, 8, 128, 128_256, True),
        _S("meta-llama/Llama-3.1-8B", "llama", 32, 4096, 14_336, 32, 8, 128, 128_256),
        _S("meta-llama/Llama-3.1-70B", "llama", 80, 8192, 28_672, 64, 8, 128, 128_256),
        _S("meta-llama/Llama-3.3-70B", "llama", 80, 8192, 28_672, 64, 8, 128, 128_256),
        _S("Qwen/Qwen3-0.6B", "qwen", 28, 1024, 3072, 16, 8, 128, 151_936, True),
        _S("Qwen/Qwen3-1.7B", "qwen", 28, 2048, 6144, 16, 8, 128, 151_936, True),
        _S("Qwen/Qwen3-4B", "qwen", 36, 2560, 9728, 32, 8, 128, 151_936, True),
        _S("Qwen/Qwen3-8B", "qwen", 36, 4096, 12_288, 32, 8, 128, 151_936),
        _S("Qwen/Qwen3-14B", "qwen", 40, 5120, 17_408, 40, 8, 128, 151_936),
        _S("Qwen/Qwen3-32B", "qwen", 64, 5120, 25_600, 64, 8, 128, 151_936),
        _S("Qwen/Qwen3-30B-A3B", "qwen", 48, 2048, 768, 32, 4, 128, 151_936, False, 128, 8),
        _S("Qwen/Qwen3-235B-A22B", "qwen", 94, 4096, 1536, 64, 4, 128, 151_936, False, 128, 8),
    )
}
"""By name."""


def shape_of(model_name: str) -> ModelShape | None:
    """Returns the shape of a model in the table, ``None`` if there is none."""
    known = [name for name in SHAPES if f"{model_name}-".startswith(f"{name}-")]
    return replace(SHAPES[max(known, key=len)], name=model_name) if known else None


@dataclass(frozen=True)
class HostedModel:
    """A hosted model: its hidden size, and the parameters of a rank-1 adapter on (MLP, attention,
    unembedding) as the service reports them. In a mixture of experts the service shares the factor
    at the hidden dimension among the experts of a layer, so an expert layer counts
    ``hidden + experts · intermediate`` for each of its three matrices. ``differs`` has the
    fields of ``Family`` that do not follow from the model's name.
    """

    name: str
    hidden: int
    lora: tuple[int, int, int]
    differs: Mapping[str, Any]


LINEUP: dict[str, HostedModel] = {}
"""Hosted models by name."""


def _hosted(name: str, *sizes: int, like: str = "", **differs: Any) -> None:
    """Adds a model with the sizes given, of the hosted model ``like``, or of its shape."""
    if sizes:
        hidden, mlp, attention, unembed = sizes
        LINEUP[name] = HostedModel(name, hidden, (mlp, attention, unembed), differs)
    elif known := LINEUP.get(like):
        LINEUP[name] = replace(known, name=name, differs=differs)
    else:
        shape = shape_of(like or name)
        assert shape is not None, name
        LINEUP[name] = HostedModel(name, shape.hidden, shape.lora_weights(), differs)


# fmt: off
_hosted("meta-llama/Llama-3.1-8B-Instruct")
_hosted("meta-llama/Llama-3.2-1B")
_hosted("meta-llama/Llama-3.2-3B")
_hosted("meta-llama/Llama-3.1-8B")
_hosted("meta-llama/Llama-3.1-70B")
_hosted("meta-llama/Llama-3.3-70B-Instruct")
_hosted("Qwen/Qwen3-VL-30B-A3B-Instruct", like="Qwen/Qwen3-30B-A3B")
_hosted("Qwen/Qwen3-VL-235B-A22B-Instruct", like="Qwen/Qwen3-235B-A22B")
_hosted("Qwen/Qwen3-8B-Base")
_hosted("Qwen/Qwen3-30B-A3B-Base")
_hosted("Qwen/Qwen3-8B")
_hosted("Qwen/Qwen3-32B")
_hosted("Qwen/Qwen3-30B-A3B")
_hosted("Qwen/Qwen3-4B-Instruct-2507")
_hosted("Qwen/Qwen3-30B-A3B-Instruct-2507")
_hosted("Qwen/Qwen3-235B-A22B-Instruct-2507")
_hosted("Qwen/Qwen3.5-4B", 2560, 1_130_496, 897_024, 250_880)
_hosted("Qwen/Qwen3.5-9B", 4096, 1_572_864, 1_130_496, 252_416)
_hosted("Qwen/Qwen3.5-9B-Base", like="Qwen/Qwen3.5-9B")
_hosted("Qwen/Qwen3.5-27B", 5120, 4_325_376, 2_965_504, 253_440)
_hosted("Qwen/Qwen3.5-35B-A3B", 2048, 16_281_600, 1_013_760, 250_368)
_hosted("Qwen/Qwen3.5-35B-A3B-Base", like="Qwen/Qwen3.5-35B-A3B")
_hosted("Qwen/Qwen3.5-397B-A17B", 4096, 96_030_720, 2_841_600, 252_416)
_hosted("Qwen/Qwen3.6-27B", like="Qwen/Qwen3.5-27B")
_hosted("Qwen/Qwen3.6-35B-A3B", like="Qwen/Qwen3.5-35B-A3B")
_hosted("Qwen/Qwen3.8-27B", like="Qwen/Qwen3.5-27B")
_hosted("deepseek-ai/DeepSeek-V3.1", 7168, 94_307_328, 2_440_000, 136_448,
         version="3", size="671B-A37B", renderers=_DEEPSEEK_V3)
_hosted("deepseek-ai/DeepSeek-V3.1-Base",
         like="deepseek-ai/DeepSeek-V3.1", version="3", size="671B-A37B")
_hosted("deepseek-ai/DeepSeek-V4.1-Flash", 5120, 107_673_600, 1_013_760, 134_400, size="552B-A16B")
_hosted("deepseek-ai/DeepSeek-V4.1-Flash-1017",
         like="deepseek-ai/DeepSeek-V4.1-Flash", size="552B-A16B")
_hosted("openai/gpt-oss-20b", 2880, 6_842_880, 497_664, 203_968,
         size="21B-A3.6B", renderers=_GPT_OSS)
_hosted("openai/gpt-oss-120b", 2880, 40_124_160, 746_496, 203_968,
         size="117B-A5.1B", renderers=_GPT_OSS)
_hosted("moonshotai/Kimi-K2-Thinking", 7168, 144_583_680, 1_940_288, 171_008)
_hosted("moonshotai/Kimi-K2.5", like="moonshotai/Kimi-K2-Thinking", size="1T-A32B")
_hosted("moonshotai/Kimi-K2.6", like="moonshotai/Kimi-K2-Thinking", size="1T-A32B")
_hosted("moonshotai/Kimi-K3.1-Pro", 7168, 766_457_856, 8_040_960, 171_008, size="2.8T-A104B")
_hosted("zai-org/GLM-5.3", 6144, 121_356_288, 2_920_320, 161_024, size="744B-A40B")
_hosted("zai-org/GLM-5.3-Flash", 4096, 75_755_520, 2_009_088, 158_976, size="320B-A18B")
_hosted("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 2688, 11_346_176, 584_832, 133_760,
         renderers=_NEMOTRON3)
_hosted("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 4096, 111_349_760, 1_675_264, 135_168)
_hosted("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 8192, 254_529_536, 4_134_912, 139_264)
_hosted("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
         like="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
_hosted("nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
         like="nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", is_vl=True)
_hosted("thinkingmachines/Inkling", 6144, 154_705_920, 3_424_256, 207_168,
         version="1", size="975B-A41B")
_hosted("thinkingmachines/Inkling-Small", 4096, 64_503_808, 1_311_744, 205_120,
         version="1", size="276B-A12B")
_hosted("thinkingmachines/Inkling-2-Small", 4608, 128_065_536, 2_347_008, 205_632,
         version="2", size="594B-A17B", is_audio_in=False)
# fmt: on

# Models that are no longer hosted, with the shape of one that is.
_SAME_SHAPE = {"deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-V3.1"}


def hosted_model(model_name: str) -> HostedModel | None:
    """Returns the hosted model with the shape of ``model_name``, ``None`` if there is none.

    The organization may be missing (``DeepSeek-V3.1``), unless a local folder has this name.
    """
    name = _SAME_SHAPE.get(model_name, model_name)
    if "/" not in name and not Path(name).exists():
        name = next((full for full in LINEUP if full.endswith(f"/{name}")), name)
    return LINEUP.get(name)
