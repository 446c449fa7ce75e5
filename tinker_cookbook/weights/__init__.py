"""Exports the weights of a finished run: ``python -m tinker_cookbook.weights COMMAND PATH out=…``.

``export`` writes the adapter as PEFT reads it, ``merge`` a whole model, and ``gguf`` files for
llama.cpp; ``card`` describes an export and ``publish`` uploads it to the Hugging Face Hub. Every
export is loaded again, and its log-probabilities are compared with those of the engine.

python -m tinker_cookbook.weights export tinker://RUN/sampler_weights/final out=my-adapter
python -m tinker_cookbook.weights merge tinker://RUN/sampler_weights/final out=my-model
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.weights._source import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]

__getattr__ = lazy_exports(
    __name__,
    {
        "Checkpoint": "tinker_cookbook.weights._source",
        "open_checkpoint": "tinker_cookbook.weights._source",
    },
)
