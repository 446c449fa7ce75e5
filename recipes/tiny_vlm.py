"""Makes vision-language models that recipes train: small, with a vision tower of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tinker_cookbook.recipes.tiny_llama import new_folder, word_tokenizer

RENDERER = "qwen3_vl_instruct"
"""Chat format of the tiny model."""
_SPECIAL = (
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Digits are tokens of their own, so that a number of two digits is two choices of ten.
_PIECES = r"\n|\d| ?[A-Za-z]+|[^\w\n]| "
_ROLES = "system\nuser\nassistant\n0123456789 .,?!"


def make_tiny_vlm(output: str, texts: Iterable[str], seed: int = 0) -> None:
    """Writes a Qwen3-VL of a million parameters, with a token for each word of ``texts``.

    An image has a token for each 8 x 8 pixels, and is made larger if it has less than 16 x 16.
    """
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    with new_folder(output) as folder:
        tokenizer = word_tokenizer(
            [*texts, _ROLES],
            _PIECES,
            folder,
            _SPECIAL,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=list(_SPECIAL[2:]),
        )
        config = Qwen3VLConfig(
            text_config=_text(len(tokenizer)), vision_config=_vision(), **_ids(tokenizer)
        )
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
        assert model.generation_config is not None
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), "utf-8")


def _ids(tokenizer: Any) -> dict[str, Any]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _text(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": _WIDTH,
        "intermediate_size": 3 * _WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": _WIDTH // 4,
        "max_position_embeddings": 1024,
        "initializer_range": _SPREAD,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
        },
    }


def _vision() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_heads": 4,
        "out_hidden_size": _WIDTH,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": _SPREAD,
    }


_WIDTH = 128
# The default of 0.02 suits large models; with it, a small one starts learning much later.
_SPREAD = 0.08
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1 << 16},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
