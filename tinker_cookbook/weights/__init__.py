"""Exports the weights of a finished run: ``python -m tinker_cookbook.weights COMMAND PATH out=…``.

``export`` writes the adapter in PEFT's format, ``merge`` a whole model, and ``gguf`` files for
llama.cpp; ``card`` describes an export and ``publish`` uploads it to the Hugging Face Hub. Every
export is reloaded, and its log-probabilities are compared with the engine's.

python -m tinker_cookbook.weights export tinker://RUN/sampler_weights/final out=my-adapter
python -m tinker_cookbook.weights merge tinker://RUN/sampler_weights/final out=my-model
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.weights._adapter import build_lora_adapter
    from tinker_cookbook.weights._download import download
    from tinker_cookbook.weights._export import build_hf_model
    from tinker_cookbook.weights._model_card import ModelCardConfig, generate_model_card
    from tinker_cookbook.weights._publish import publish_to_hf_hub
    from tinker_cookbook.weights._source import Checkpoint, open_checkpoint

__all__ = [
    "Checkpoint",
    "ModelCardConfig",
    "build_hf_model",
    "build_lora_adapter",
    "download",
    "generate_model_card",
    "open_checkpoint",
    "publish_to_hf_hub",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "Checkpoint": "tinker_cookbook.weights._source",
        "ModelCardConfig": "tinker_cookbook.weights._model_card",
        "build_hf_model": "tinker_cookbook.weights._export",
        "build_lora_adapter": "tinker_cookbook.weights._adapter",
        "download": "tinker_cookbook.weights._download",
        "generate_model_card": "tinker_cookbook.weights._model_card",
        "open_checkpoint": "tinker_cookbook.weights._source",
        "publish_to_hf_hub": "tinker_cookbook.weights._publish",
    },
)
