"""Vision-language models of random weights, small enough for tests: the true architectures of
transformers with processors and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """Writes a model of type ``kind`` (one of ``_ALL``) to ``folder``, and returns it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    made = _ALL[kind]
    text = {**_TEXT, **made.text}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=made.vision, **made.config)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    # Larger than usual: with small weights, outputs hardly depend on an image.
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(made.images))
    if made.processor is not None:
        (folder / "processor_config.json").write_text(json.dumps(made.processor))
        chat = (_IMAGES_FIRST if kind == "llava" else _CHATML).replace("MARK", made.marks[0])
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": chat}))
    _save_tokenizer(folder, kind)
    return folder


_VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_MEANS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_SQUARE = {"size": {"height": 32, "width": 32}}
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


@dataclass(frozen=True)
class _Kind:
    """A model type: settings of its language model, vision tower, image processor and config."""

    text: dict[str, Any]
    vision: dict[str, Any]
    images: dict[str, Any]
    config: dict[str, Any]
    marks: Sequence[str]
    """Tokens from ``IMAGE_TOKEN`` on."""
    processor: dict[str, Any] | None = None
    """Of transformers' whole processor, by which the engine reads some kinds."""
    named: dict[str, str] = field(default_factory=dict)


def _qwen(text: dict[str, Any], vision: dict[str, Any]) -> _Kind:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    shared = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    shared |= {"out_hidden_size": _TEXT["hidden_size"], "patch_size": 8}
    images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
    images |= {"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1 << 16}}
    ids = {"image_token_id": IMAGE_TOKEN, "video_token_id": 301}
    ids |= {"vision_start_token_id": 302, "vision_end_token_id": 303}
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    text = {"rope_parameters": rope, **text}
    return _Kind(text, {**shared, **vision}, {**images, **_MEANS}, ids, marks)


def _idefics(name: str) -> _Kind:
    images = {"image_processor_type": f"{name}ImageProcessor", "size": {"longest_edge": 64}}
    images |= {"max_image_size": {"longest_edge": 32}, **_MEANS}
    config = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2}
    return _Kind({"model_type": "llama"}, _VIT, images, config, ("<image>",))


def _whole(
    text: str,
    vision: dict[str, Any],
    images: dict[str, Any],
    processor: dict[str, Any],
    marks: Sequence[str] = ("<image>",),
    named: dict[str, str] | None = None,
    **config: Any,
) -> _Kind:
    token = "image_token_id" if named else "image_token_index"
    config |= {"tie_word_embeddings": False, token: IMAGE_TOKEN}
    settings = {"model_type": text, "pad_token_id": None}
    return _Kind(settings, {**_VIT, **vision}, images, config, marks, processor, named or {})


_DEEP = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
_GRID = [[32, 32], [32, 64], [64, 32], [64, 64]]
_SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
_ALL = {
    "qwen3_vl": _qwen({}, _DEEP),
    "qwen3_vl_moe": _qwen(
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, _DEEP
    ),
    "qwen2_5_vl": _qwen({}, {"window_size": 32, "fullatt_block_indexes": [2]}),
    "qwen3_5": _qwen(
        {
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 1.0,
            },
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
        {"num_position_embeddings": 64},
    ),
    "smolvlm": _idefics("SmolVLM"),
    "idefics3": _idefics("Idefics3"),
    "gemma3": _Kind(
        {
            "query_pre_attn_scalar": 16, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {**_VIT, "num_hidden_layers": 2, "image_size": 64},
        {
            "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64},
            **_MEANS,
        },
        {
            "mm_tokens_per_image": 16, "image_token_index": IMAGE_TOKEN,
            "boi_token_index": 302, "eoi_token_index": 303,
        },
        ("<image_soft_token>", "<unused>", "<start_of_image>", "<end_of_image>"),
    ),
    "llava": _whole(
        "llama",
        {"model_type": "clip_vision_model", "projection_dim": 32},
        {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
        {
            "processor_class": "LlavaProcessor", "patch_size": 8,
            "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default",
        },
    ),
    "llava_onevision": _whole(
        "qwen2",
        _SIGLIP,
        {
            "image_processor_type": "LlavaOnevisionImageProcessor", **_SQUARE,
            "image_grid_pinpoints": _GRID,
        },
        {
            "processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
        },
        ("<image>", "<video>"),
        image_grid_pinpoints=_GRID,
    ),
    "internvl": _whole(
        "qwen2",
        {"image_size": [32, 32], "patch_size": [8, 8]},
        {
            "image_processor_type": "GotOcr2ImageProcessor", **_SQUARE,
            "crop_to_patches": True, "max_patches": 4,
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        {
            "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
            "end_image_token": "</img>", "video_token": "<video>",
        },
    ),
    "mistral3": _whole(
        "mistral",
        {"model_type": "pixtral", "image_size": 64, "head_dim": 16},
        {
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64},
            "patch_size": 8,
        },
        {
            "processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2,
            "image_token": "[IMG]",
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        spatial_merge_size=2,
    ),
    "paligemma": _whole(
        "gemma",
        {**_SIGLIP, "projection_dim": 64},
        {"image_processor_type": "SiglipImageProcessor", **_SQUARE, "image_seq_length": 16},
        {"processor_class": "PaliGemmaProcessor"},
        projection_dim=64,
    ),
}  # fmt: skip


_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 6) for column in range(1, 6)]


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
    made = _ALL[kind]
    marks += made.marks
    more: dict[str, Any] = {}
    if made.processor is not None:
        inner.add_special_tokens(marks)
        more = {"bos_token": "<bos>", "extra_special_tokens": made.named}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", **more)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    assert tokenizer.convert_tokens_to_ids("<reserved_0>") < IMAGE_TOKEN
    tokenizer.save_pretrained(folder)


KINDS = ("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
"""Kinds that differ from each other in the engine."""
WHOLE_KINDS = ("internvl", "mistral3")
"""Those that it reads by transformers' whole processor; ``llava`` is simpler."""
