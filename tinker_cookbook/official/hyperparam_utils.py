"""Learning rates by the number of parameters (``hyperparam_utils``)."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tinker_cookbook.engine.model.resolve import base_name, resolve_model
from tinker_cookbook.exceptions import ConfigurationError, ModelNotFoundError
from tinker_cookbook.hyperparam_utils import LORA_FACTOR, known_shape


def get_lora_lr_over_full_finetune_lr(model_name: str, lora_alpha: int = 32) -> float:
    """Returns the ratio of the best learning rates of LoRA and full fine-tuning: 10.

    Raises:
        ConfigurationError: ``lora_alpha`` is not 32, the only value that was measured.
    """
    if lora_alpha != 32:
        raise ConfigurationError(
            f"lora_alpha: got {lora_alpha}, expected 32; the factor between LoRA and full "
            f"fine-tuning was measured at 32 only (model {model_name!r})"
        )
    return LORA_FACTOR


def get_full_finetune_param_count(model_name: str) -> float:
    """Returns the number of parameters of the base model.

    It is read from the headers of a local copy of the weights, or computed from the shape.

    Raises:
        ConfigurationError: The shape is unknown and there is no copy on this machine.
    """
    return float(_parameter_count(base_name(model_name)))


def get_full_finetune_lr_multiplier(model_name: str) -> float:
    """Returns the scale of the full fine-tuning learning rate: ``1 / sqrt(parameters)``."""
    return 1.0 / math.sqrt(get_full_finetune_param_count(model_name))


def get_lora_lr_multiplier(model_name: str) -> float:
    """Returns the scale of the LoRA learning rate: 10 times the one for full fine-tuning.

    A rate tuned on model A transfers to B as ``lr_B = lr_A · multiplier(B) / multiplier(A)``.
    """
    factor = get_lora_lr_over_full_finetune_lr(model_name)
    return get_full_finetune_lr_multiplier(model_name) * factor


def _parameter_count(name: str) -> int:
    """Returns the exact number from the headers of local weights, else an estimate from the
    shape."""
    try:
        return _stored_parameter_count(resolve_model(name, allow_download=False).folder)
    except ModelNotFoundError:
        return known_shape(name).all_parameters


def _stored_parameter_count(folder: Path) -> int:
    total = 0
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as stream:  # 8 bytes with the header's length, then JSON
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        tensors = (entry for key, entry in header.items() if key != "__metadata__")
        total += sum(math.prod(entry["shape"]) for entry in tensors)
    if not total:
        raise ModelNotFoundError(f"{folder} has no safetensors weights to count")
    return total
