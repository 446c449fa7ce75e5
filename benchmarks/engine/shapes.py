"""Models of a published shape with random weights: speed does not depend on what they learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tinker_cookbook.engine.model.loading import model_class
from tinker_cookbook.exceptions import ConfigurationError, nearest

PREFIX = "shape:"


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": 1e-6,
    }


# The public configurations of Qwen/Qwen3-0.6B, -4B and -8B; "tiny" is for tests.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "tiny": _qwen3(64, 192, 2, 4, tied=True)
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
    },
}


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    vocabulary, marks = text["vocab_size"], ("image_token", "video_token", "vision_start_token")
    return {
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": True,
        **{f"{mark}_id": vocabulary - 1 - number for number, mark in enumerate(marks)},
        "vision_end_token_id": vocabulary - 4,
    }


# Qwen3-VL with the decoder of SmolLM2-135M and a tower like that of SmolVLM-256M (ViT-B/16).
VISION_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-0.2b": _qwen3_vl(
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100_000.0,
                "mrope_section": [16, 8, 8],
            },
        },
        {
            "depth": 12,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_heads": 12,
            "patch_size": 16,
            "num_position_embeddings": 1024,
            "deepstack_visual_indexes": [3, 6, 9],
        },
    ),
    "tiny-vl": _qwen3_vl(
        {
            **SHAPES["tiny"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
            },
        },
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
}


def is_shape(model: str) -> bool:
    """Returns whether a model setting means random weights."""
    return model.startswith(PREFIX)


def shape_config(model: str) -> Any:
    """The transformers configuration of ``shape:NAME``."""
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPES[_known(model, SHAPES)])


def write_vision_shape(model: str, folder: Path) -> None:
    """Writes configuration and image processor of ``shape:NAME`` to ``folder``."""
    from transformers import Qwen3VLConfig

    shape = VISION_SHAPES[_known(model, VISION_SHAPES)]
    Qwen3VLConfig(**shape).save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": shape["vision_config"]["patch_size"],
        "size": {"shortest_edge": 1 << 10, "longest_edge": 1 << 24},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def _known(model: str, shapes: dict[str, Any]) -> str:
    name = model.removeprefix(PREFIX)
    if name not in shapes:
        names = [PREFIX + shape for shape in shapes]
        raise ConfigurationError(
            f"model: got {model!r}, expected one of {', '.join(names)}, a Hub name or a folder"
            + nearest(model, names)
        )
    return name


def write_random_model(folder: Path, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Creates random weights for the ``config.json`` in ``folder`` and saves them there.

    Both variants then load the very same weights in the same way.
    """
    from transformers import AutoConfig

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device(device):
        model = model_class(folder).from_config(config, dtype=dtype)
    model.save_pretrained(folder)
