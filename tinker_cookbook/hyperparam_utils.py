"""Computes learning rates and adapter sizes from a model's shape.

    LR(m) = 5e-5 · M_LoRA · (2000 / H_m) ^ P_m

with ``M_LoRA`` = 10 for LoRA and 1 for full fine-tuning, ``H_m`` the hidden size, and ``P_m``
fitted to sweeps: 0.781 for Llama models, 0.0775 for Qwen models. The rate does not depend on the
rank. The factor 10 is from "LoRA Without Regret" (Thinking Machines Lab, 2025).
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinker_cookbook.engine.model.resolve import base_name, model_config, resolve_model
from tinker_cookbook.exceptions import ConfigurationError, ModelNotFoundError, nearest
from tinker_cookbook.model_shapes import ModelShape
from tinker_cookbook.model_table import SHAPES, hosted_model, shape_of
from tinker_cookbook.utils.imports import official_names

logger = logging.getLogger(__name__)

__getattr__ = official_names(__name__)

_BASE_LR = 5e-5
LORA_FACTOR = 10.0
_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Latent attention, linear attention, state-space layers, shared experts.
_UNUSUAL_KEYS = (
    "kv_lora_rank",
    "linear_num_key_heads",
    "mamba_num_heads",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "mlp_only_layers",
)


def get_lr(model_name: str, is_lora: bool = True) -> float:
    """Returns the recommended Adam learning rate for supervised fine-tuning (formula above).

    The hidden size of a hosted model is in a table. For other models it is read from the
    ``config.json`` of a local folder or cached copy; nothing is downloaded. Families other than
    Llama and Qwen get the Llama exponent, with a warning.

    Raises:
        ConfigurationError: The model is unknown and there is no copy on this machine.
    """
    family, hidden = _family_and_hidden_size(base_name(model_name))
    exponent = _EXPONENTS.get(family)
    if exponent is None:
        exponent = _EXPONENTS["llama"]
        _warn_once(
            f"get_lr: no exponent was fitted for {model_name!r} (family {family!r}); the exponent "
            f"of Llama models, {exponent}, was assumed. Sweep learning_rate around the result."
        )
    factor = LORA_FACTOR if is_lora else 1.0
    return _BASE_LR * factor * (2000 / hidden) ** exponent


def get_lora_param_count(
    model_name: str,
    lora_rank: int = 32,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
) -> int:
    """Returns the number of parameters of an adapter: the sum of ``rank · (inputs + outputs)``.

    Hosted models have the sizes that the service reports. As in the service, the experts of a layer
    share the factor at the hidden dimension, so each of the three expert matrices counts
    ``hidden + experts · intermediate``. The router has no adapter.

    Raises:
        ConfigurationError: The rank is below 1, nothing is trained, or the model is unknown and
            there is no copy on this machine.
    """
    if lora_rank < 1:
        raise ConfigurationError(f"lora_rank: got {lora_rank}, expected a whole number from 1")
    if not (train_mlp or train_attn or train_unembed):
        raise ConfigurationError(
            "train_mlp, train_attn, train_unembed: got False for all three, expected at least one "
            "True: an adapter needs layers to train"
        )
    name = base_name(model_name)
    known = hosted_model(name)
    # Sizes reported by the service take precedence over sizes computed from the shape.
    sizes = known.lora if known else _adapter_sizes(name)
    trained = (train_mlp, train_attn, train_unembed)
    return lora_rank * sum(size for size, trains in zip(sizes, trained, strict=True) if trains)


def _adapter_sizes(name: str) -> tuple[int, int, int]:
    """Returns the sizes of rank-1 adapters on MLP, attention and unembedding, from the shape."""
    shape = known_shape(name)
    if shape.unusual:
        raise ConfigurationError(
            f"model_name: the layers of {name!r} are unusual (its config.json has "
            f"{shape.unusual!r}), so the size of an adapter cannot be computed from its "
            "configuration; count the tensors of a saved adapter instead"
        )
    return shape.lora_weights()


def get_vision_lora_param_count(model_name: str, lora_rank: int = 32) -> int:
    """Returns the number of parameters that ``train_vision`` adds to an adapter: those on linear
    layers of the vision tower and its connector.

    Raises ``ConfigurationError`` if there is no copy of the model on this machine, or it has no
    vision tower.
    """
    name = base_name(model_name)
    # Imported late, because only these models need transformers.
    from torch import nn

    from tinker_cookbook.engine.model.loading import empty_model

    folder = resolve_model(name, allow_download=False, need="config").folder
    model = empty_model(folder)
    if model is None or "vision_config" not in model_config(folder):
        raise ConfigurationError(
            f"train_vision: got True, but {name!r} has no vision tower that transformers knows; "
            "set train_vision=False"
        )
    language = {id(module) for module in model.get_decoder().modules()}
    language.add(id(model.get_output_embeddings()))
    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    sizes = (one.in_features + one.out_features for one in layers if id(one) not in language)
    return lora_rank * sum(sizes)


def _family_and_hidden_size(name: str) -> tuple[str, int]:
    known = hosted_model(name)
    if known is None:
        shape = known_shape(name)
        return shape.family, shape.hidden
    organization = known.name.partition("/")[0]
    family = next((family for family in _EXPONENTS if family in name.lower()), organization)
    return family, known.hidden


def known_shape(name: str) -> ModelShape:
    """Returns the shape from the table, otherwise from the configuration of a local copy."""
    if known := shape_of(name):
        return known
    try:
        folder = resolve_model(name, allow_download=False, need="config").folder
    except ModelNotFoundError as error:
        raise ConfigurationError(
            f"model_name: the shape of {name!r} is not known and there is no copy of it on this "
            "machine; set learning_rate yourself, or give a local folder" + nearest(name, SHAPES)
        ) from error
    return _shape_of_config(folder, model_config(folder))


def _shape_of_config(folder: Path, config: dict[str, Any]) -> ModelShape:
    config = {**config, **(config.get("text_config") or {})}  # multimodal models nest the decoder
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        model_type = str(config.get("model_type", ""))
        # Each family names the number of experts differently.
        experts = next((int(config[key]) for key in _EXPERT_KEYS if config.get(key)), 0)
        # Width of an expert; intermediate_size is the width of dense layers.
        is_wide = experts and "moe_intermediate_size" in config
        width = "moe_intermediate_size" if is_wide else "intermediate_size"
        return ModelShape(
            name=str(folder),
            family=next(
                (family for family in _EXPONENTS if model_type.startswith(family)), model_type
            ),
            hidden=hidden,
            inner=int(config[width]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            unusual=next((key for key in _UNUSUAL_KEYS if config.get(key)), ""),
        )
    except KeyError as error:
        raise ConfigurationError(
            f"{folder / 'config.json'}: {error} is missing, so the model's shape is not known; "
            "set learning_rate yourself"
        ) from error


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
