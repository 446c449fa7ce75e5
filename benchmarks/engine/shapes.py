"""Models of a published shape with random weights: speed does not depend on what they learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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


def is_shape(model: str) -> bool:
    """Returns whether a model setting means random weights."""
    return model.startswith(PREFIX)


def shape_config(model: str) -> Any:
    """The transformers configuration of ``shape:NAME``."""
    from transformers import Qwen3Config

    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        known = ", ".join(PREFIX + shape for shape in SHAPES)
        raise ConfigurationError(
            f"model: got {model!r}, expected one of {known}, a Hub name or a folder"
            + nearest(model, [PREFIX + shape for shape in SHAPES])
        )
    return Qwen3Config(**SHAPES[name])


def write_random_model(folder: Path, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Creates random weights for the ``config.json`` in ``folder`` and saves them there.

    Both variants then load the very same weights in the same way.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
