"""Preparations for loading a base model: imports its code, and checks that it fits into memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tinker_cookbook._process import importing_libraries
from tinker_cookbook.engine.device_names import BITS
from tinker_cookbook.engine.model.resolve import model_config
from tinker_cookbook.exceptions import ConfigurationError

# transformers loads its modules at their first use, and some of them import each other. When the
# engine's worker loads them while the user's thread imports from transformers too, Python breaks
# the cycle by handing out a half-initialized module, and either thread fails with an
# ``ImportError``. After the two functions below, the worker does not import anything.
_MODULES = (
    "transformers.cache_utils",
    "transformers.generation.utils",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
_CUDA_MODULES = ("torch.nn.attention.flex_attention", "torch.nn.attention.varlen")
_lock = threading.Lock()


def import_library(device: torch.device | None = None) -> None:
    """Imports the parts of transformers that every model needs, and of torch those for ``device``.
    Takes seconds the first time."""
    on_cuda = device is not None and device.type == "cuda"
    with _lock, importing_libraries():
        for module in (*_MODULES, *(_CUDA_MODULES if on_cuda else ())):
            import_module(module)


def import_architecture(folder: Path) -> None:
    """Imports the code of the model in ``folder``; leaves errors to ``BaseModel``."""
    from transformers import AutoConfig

    with _lock:
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            _ = model_class(folder)._model_mapping[type(config)]  # the lookup imports the class
        except Exception:  # loading the model will report the error
            return


def model_class(folder: Path) -> Any:
    """Returns the class of transformers that loads the model in ``folder``."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES,
    )

    # Some types are in both lists. With the vision tower images work, and adapters have the names
    # that other programs look for.
    config = model_config(folder)
    takes_images = "vision_config" in config and config.get("model_type") in WITH_IMAGES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def empty_model(folder: Path) -> Any | None:
    """Returns transformers' model on the meta device; ``None`` if it cannot be built, for example
    because it needs code from the folder."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return model_class(folder).from_config(config)
    except Exception:  # loading the model will report the error
        return None


def check_architecture(name: str, folder: Path) -> None:
    """Raises ``ConfigurationError`` if transformers has no text-writing model for ``folder``."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = model_config(folder).get("model_type")
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if kind is not None and kind not in known:
        raise ConfigurationError(
            f"model_name: {name} has the model type {kind!r}, for which transformers has neither a "
            "causal language model nor a vision-language model; expected a model that writes text"
        )


def dequantized(name: str, folder: Path) -> dict[str, Any]:
    """Returns the arguments of ``from_pretrained`` to load a model in full precision.

    Raises ``ConfigurationError`` for a checkpoint that is stored quantised, other than in MXFP4
    (gpt-oss), which transformers converts.
    """
    config = model_config(folder)
    found = config.get("quantization_config") or (config.get("text_config") or {}).get(
        "quantization_config"
    )
    if not found:
        return {}
    method = str(found.get("quant_method") or "an unknown method")
    if method == "mxfp4":
        from transformers.utils.quantization_config import Mxfp4Config

        return {"quantization_config": Mxfp4Config(dequantize=True)}
    raise ConfigurationError(
        f"model_name: {name} is stored quantised (quantization_config: {method}), and the engine "
        "quantises models itself, so that sampling and training read the same weights; give the "
        "model's original weights in bfloat16, float16 or float32, with base_dtype=nf4 or "
        "base_dtype=int8 to hold them in 4 or 8 bits"
    )


_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_IN_LAYER = re.compile(r"\.\d+\.")
_HEAD = re.compile("lm_head|embed_out")
_TABLE = re.compile("embed_tokens|wte|lm_head|embed_out")
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def weights_bytes(
    folder: Path, dtype: torch.dtype, base_dtype: str = "auto", shards: int = 1
) -> int:
    """Returns the memory of a model's weights in ``dtype``, with the matrices of its layers in
    ``base_dtype`` and sharded among ``shards`` processes; embeddings and head have 8 bits if the
    layers are quantised. Returns the size of the files if they are not safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return sum(file.stat().st_size for file in folder.glob("pytorch_model*.bin"))
    shapes: dict[str, Any] = {}
    for file in files:
        with open(file, "rb") as stream:
            shapes |= _header(stream)
    total = 0
    for name, entry in shapes.items():
        kind = entry["dtype"]
        # Loading converts floats to ``dtype`` and leaves integers.
        item: float = dtype.itemsize if kind in _FLOATS else _ITEM_BYTES.get(kind, 1)
        if len(entry["shape"]) > 1 and _IN_LAYER.search(name):
            item = (BITS[base_dtype] / 8 if base_dtype in BITS else item) / shards
        elif base_dtype in BITS and _TABLE.search(name):
            item = 1
        total += int(prod(entry["shape"]) * item)
    # A tied unembedding counts twice, because the head's copy is reordered for products. A
    # quantised one has no copy.
    if base_dtype not in BITS and not any(_HEAD.search(name) for name in shapes):
        tied = [entry["shape"] for name, entry in shapes.items() if _TABLE.search(name)]
        total += sum(prod(shape) for shape in tied) * dtype.itemsize
    return total


def _header(stream: BinaryIO) -> dict[str, Any]:
    """Reads dtype, shape and place of each tensor of a safetensors file, whose first 8 bytes are
    the length of this JSON."""
    header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    return header


_TENSOR_SAMPLES, _TENSOR_SAMPLE_BYTES = 4, 1024


def weights_digest(folder: Path) -> str:
    """Returns a fast hash of a model's weights; empty without safetensors files.

    It identifies the base model of an adapter: every copy has the same, wherever it is and however
    it is divided into files. It covers the name, dtype and shape of each tensor, and four evenly
    spaced KiB of its values.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    names = {single.name} if single.is_file() else set()
    if index.is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    found: dict[str, bytes] = {}
    for name in names:
        with open(folder / name, "rb") as stream:
            header = _header(stream)
            begin = stream.tell()
            for tensor, entry in header.items():
                start, end = entry["data_offsets"]
                last = max(0, end - start - _TENSOR_SAMPLE_BYTES)
                digest = hashlib.sha256(f"{tensor} {entry['dtype']} {entry['shape']}".encode())
                for sample in range(_TENSOR_SAMPLES):
                    at = sample * last // (_TENSOR_SAMPLES - 1)
                    stream.seek(begin + start + at)
                    digest.update(stream.read(min(_TENSOR_SAMPLE_BYTES, end - start)))
                found[tensor] = digest.digest()
    joined = b"".join(found[tensor] for tensor in sorted(found))
    return hashlib.sha256(joined).hexdigest()[:16] if found else ""


def size_text(count: int) -> str:
    """Formats bytes as MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"


def eos_ids(model: Any) -> tuple[int, ...]:
    """Returns the token ids that end an answer, by the model's configurations."""
    # generation_config.json takes precedence, as in ``generate``.
    text_config = getattr(model.config, "text_config", None)
    configs = (getattr(model, "generation_config", None), model.config, text_config)
    found = (getattr(config, "eos_token_id", None) for config in configs)
    eos = next((ids for ids in found if ids is not None), ())
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def leave_file(model: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Copies ``parameters`` that are still memory-mapped, to free the pages of the weight file."""
    # The head and most matrices are packed by now, and their plain tensors are gone.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.new_empty(0), requires_grad=False)
    for parameter in parameters:
        parameter.data = parameter.data.clone()
