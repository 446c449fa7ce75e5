"""Vision-language models of random weights, small enough for tests: the true architectures of
transformers with processors and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

_VOCABULARY = 320
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
IMAGE_TOKEN = 300


def tiny_vlm(folder: Path, kind: str, seed: int = 0) -> Path:
    """Writes a model of type ``kind`` (one of ``_MAKERS``) to ``folder``, and returns it."""
    torch.manual_seed(seed)
    model, processor = (_MAKERS.get(kind) or partial(_generic, kind))()
    # Larger than usual: with small weights, outputs hardly depend on an image.
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if kind in _GENERIC:
        whole = {"processor_class": _GENERIC[kind].processor, **_GENERIC[kind].arguments}
        (folder / "processor_config.json").write_text(json.dumps(whole))
        chat = _IMAGES_FIRST if kind == "llava" else _CHATML
        chat = {"chat_template": chat.replace("MARK", _GENERIC[kind].marks[0])}
        (folder / "chat_template.json").write_text(json.dumps(chat))
    _save_tokenizer(folder, kind)
    return folder


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


_QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}


def _qwen_processor(patch: int) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 1 << 16},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _qwen3_vl() -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(text_config=_qwen_text(), vision_config=_qwen3_vision(), **_QWEN_IDS)
    return Qwen3VLForConditionalGeneration(config), _qwen_processor(8)


def _qwen3_vl_moe() -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = {**_qwen_text(), **experts}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=_qwen3_vision(), **_QWEN_IDS)
    return Qwen3VLMoeForConditionalGeneration(config), _qwen_processor(8)


def _qwen2_5_vl() -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": _TEXT["hidden_size"],
        "patch_size": 8,
        "window_size": 32,
        "fullatt_block_indexes": [2],
    }
    config = Qwen2_5_VLConfig(text_config=_qwen_text(), vision_config=vision, **_QWEN_IDS)
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_processor(8)


def _qwen_text() -> dict[str, Any]:
    return {**_TEXT, "rope_parameters": _rope()}


def _qwen3_5() -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        **_TEXT,
        "rope_parameters": {**_rope(), "partial_rotary_factor": 1.0},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    vision = _qwen3_vision()
    del vision["deepstack_visual_indexes"]
    config = Qwen3_5Config(text_config=text, vision_config=vision, **_QWEN_IDS)
    return Qwen3_5ForConditionalGeneration(config), _qwen_processor(8)


def _qwen3_vision() -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": _TEXT["hidden_size"],
        "patch_size": 8,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 2],
    }


_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def _smolvlm() -> tuple[Any, dict[str, Any]]:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    return _idefics(SmolVLMConfig, SmolVLMForConditionalGeneration)


def _idefics3() -> tuple[Any, dict[str, Any]]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    return _idefics(Idefics3Config, Idefics3ForConditionalGeneration)


def _idefics(config_class: Any, model_class: Any) -> tuple[Any, dict[str, Any]]:
    config = config_class(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config=_VIT,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
    )
    processor = {
        "image_processor_type": f"{config_class.__name__.removesuffix('Config')}ImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return model_class(config), processor


def _gemma3() -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**_TEXT, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": layers}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=16,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=302,
        eoi_token_index=303,
    )
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 64, "width": 64},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Gemma3ForConditionalGeneration(config), processor


@dataclass(frozen=True)
class _Generic:
    """A kind of model that the engine reads by transformers' whole processor."""

    processor: str
    text: str
    vision: dict[str, Any]
    images: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ("<image>",)
    named: dict[str, str] = field(default_factory=dict)


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else 'MARK\n' }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IMAGES_FIRST = (
    "<bos>{% for m in messages %}{{ m.role | upper }}: "
    "{% for p in m.content if p.type == 'image' %}MARK\n{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    "{{ '<|im_end|>' if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
_SQUARE = {"size": {"height": 32, "width": 32}}
_GENERIC = {
    "llava": _Generic(
        "LlavaProcessor",
        "llama",
        {**_VIT, "model_type": "clip_vision_model", "projection_dim": 32},
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
        {
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
    "llava_onevision": _Generic(
        "LlavaOnevisionProcessor",
        "qwen2",
        {**_VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            **_SQUARE,
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]],
        },
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]]},
        ("<image>", "<video>"),
    ),
    "internvl": _Generic(
        "InternVLProcessor",
        "qwen2",
        {**_VIT, "image_size": [32, 32], "patch_size": [8, 8]},
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            **_SQUARE,
            "crop_to_patches": True,
            "max_patches": 4,
        },
        {"image_seq_length": 4},
        marks=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        named={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
    ),
    "mistral3": _Generic(
        "PixtralProcessor",
        "mistral",
        {**_VIT, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 64},
            "patch_size": 8,
        },
        {"patch_size": 8, "spatial_merge_size": 2, "image_token": "[IMG]"},
        {"spatial_merge_size": 2},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "paligemma": _Generic(
        "PaliGemmaProcessor",
        "gemma",
        {
            **_VIT,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "projection_dim": 64,
        },
        {"image_processor_type": "SiglipImageProcessor", **_SQUARE, "image_seq_length": 16},
        config={"projection_dim": 64},
    ),
}


def _generic(kind: str) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForImageTextToText

    made = _GENERIC[kind]
    token = "image_token_id" if kind == "internvl" else "image_token_index"
    config = AutoConfig.for_model(
        kind,
        text_config={**_TEXT, "model_type": made.text, "pad_token_id": None},
        vision_config=made.vision,
        tie_word_embeddings=False,
        **{token: IMAGE_TOKEN},
        **made.config,
    )
    return AutoModelForImageTextToText.from_config(config), made.images


_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 6) for column in range(1, 6)]
_MARKS = {
    "qwen": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "gemma": ["<image_soft_token>", "<unused>", "<start_of_image>", "<end_of_image>"],
    "smolvlm": ["<image>"],
    "idefics3": ["<image>"],
}
"""Tokens from ``IMAGE_TOKEN`` on."""


def _save_tokenizer(folder: Path, kind: str) -> None:
    """Bytes, and the marks of the kind of model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>", "<bos>", "<|begin_of_text|>"]
    marks += ["<end_of_utterance>", "<start_of_turn>", "<end_of_turn>"]
    if kind in ("smolvlm", "idefics3"):
        marks += ["<fake_token_around_image>", "<global-img>", *_TILES]
    marks += [f"<reserved_{i}>" for i in range(IMAGE_TOKEN - len(letters) - len(marks))]
    generic = _GENERIC.get(kind)
    if generic is not None:
        marks += generic.marks
    else:
        marks += next(tokens for name, tokens in _MARKS.items() if kind.startswith(name))
    more: dict[str, Any] = {}
    if generic is not None:
        inner.add_special_tokens(marks)
        more = {"bos_token": "<bos>", "extra_special_tokens": generic.named}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", **more)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    assert tokenizer.convert_tokens_to_ids("<reserved_0>") < IMAGE_TOKEN
    tokenizer.save_pretrained(folder)


_MAKERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "gemma3": _gemma3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "smolvlm": _smolvlm,
}
KINDS = tuple(_MAKERS)
"""Kinds that differ from each other in the engine."""
WHOLE_KINDS = ("internvl", "mistral3")
"""Those that it reads by transformers' whole processor; ``llava`` is simpler."""
_MAKERS |= {"idefics3": _idefics3, "qwen3_5": _qwen3_5}
