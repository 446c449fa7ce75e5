"""Imports the needed parts of transformers in the calling thread.

transformers loads its modules at their first use, and some of them import each other. When the
engine's worker loads them while the user's thread imports from transformers too, Python breaks the
cycle by handing out a half-initialized module, and either thread fails with an ``ImportError``.
After the calls below the worker imports nothing, so the user's thread may.
"""

from __future__ import annotations

import threading
from importlib import import_module
from pathlib import Path

_MODULES = (
    "transformers.cache_utils",
    "transformers.generation.utils",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
_lock = threading.Lock()


def import_library() -> None:
    """Imports the parts of transformers that every model needs. Takes seconds the first time."""
    with _lock:
        for module in _MODULES:
            import_module(module)


def import_architecture(folder: Path) -> None:
    """Imports the code of the model whose ``config.json`` lies in ``folder``.

    Does nothing for an unknown configuration; loading it raises the error.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with _lock:
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            _ = AutoModelForCausalLM._model_mapping[type(config)]  # the lookup imports the class
        except Exception:  # whatever is wrong with the model, loading it names
            return
