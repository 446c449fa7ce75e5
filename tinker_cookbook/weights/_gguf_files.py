"""Writes GGUF files: a merged model, or only the adapter.

Tensors are read, merged in float32, quantized and written one by one, so that only a few
are in memory at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, WeightsMergeError, nearest
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.gguf_reader import open_gguf
from tinker_cookbook.weights._chat_files import chat_of
from tinker_cookbook.weights._gguf_architectures import ROPE_FACTORS, Architecture
from tinker_cookbook.weights._gguf_tokenizer import vocabulary_of
from tinker_cookbook.weights._merge import weight_files
from tinker_cookbook.weights._modules import HEAD
from tinker_cookbook.weights._source import Checkpoint, LowRankUpdate

if TYPE_CHECKING:
    import gguf
    from torch import Tensor

QUANTS = ("f32", "f16", "bf16", "q8_0", "q4_0")
EMBEDDINGS = "model.embed_tokens.weight"
_HEAD_WEIGHT = f"{HEAD}.weight"
_FILE_TYPES = {
    "f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}  # fmt: skip


def check_quant(quant: str) -> str:
    """Returns ``quant`` in lower case; raises ``ConfigurationError`` for an unknown one."""
    if quant.lower() not in QUANTS:
        raise ConfigurationError(
            f"quant: got {quant!r}, expected one of {', '.join(QUANTS)}"
            f"{nearest(quant.lower(), QUANTS)}"
        )
    return quant.lower()


def write_model_file(
    checkpoint: Checkpoint, path: Path, quant: str, *, merge: bool = True
) -> dict[str, str]:
    """Writes a model as GGUF; returns facts about it for the proof.

    Args:
        checkpoint: The adapter, and the folder of its base model.
        path: File to write.
        quant: One of ``QUANTS``, for all matrices with rows that are multiples of its block.
        merge: Whether to merge the adapter; ``False`` writes only the base model.

    Raises:
        WeightsMergeError: llama.cpp lacks the architecture, or the adapter belongs to another
            model.
    """
    import gguf

    architecture, chat = Architecture.of(checkpoint.base_folder), chat_of(checkpoint)
    tensors = _model_tensors(checkpoint, architecture, quant, merge)
    tokenizer = get_tokenizer(str(checkpoint.base_folder))
    vocabulary = vocabulary_of(tokenizer, int(architecture.config.vocab_size), chat)
    with closing(gguf.GGUFWriter(path, architecture.name)) as writer:
        writer.add_type("model")
        _write_names(checkpoint, writer)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[quant]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        architecture.write(writer)
        vocabulary.write(writer)
        for one in tensors:
            block, size = gguf.GGML_QUANT_SIZES[one.kind]
            count = prod(one.shape) // block * size
            writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), count, one.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in tensors:
            writer.write_tensor_data(one.encoded())
    kinds = Counter(one.kind.name for one in tensors)
    facts = {"tensors": ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))}
    if merge:
        facts["changed tensors"] = str(len(checkpoint.updates))
        if HEAD in checkpoint.updates and architecture.config.tie_word_embeddings:
            facts["head"] = (
                "stored as output.weight, apart from the embeddings, because the adapter changes "
                "the head alone"
            )
    return facts | chat.facts


def check_model_file(checkpoint: Checkpoint, path: Path, quant: str, *, merge: bool = True) -> str:
    """Checks that each tensor of a model's file is ``W + s B A`` (or ``W``), rounded to its type;
    returns a sentence for the proof. Reads one tensor after the other.

    Raises:
        WeightsMergeError: A tensor is missing, or has other values.
    """
    architecture = Architecture.of(checkpoint.base_folder)
    tensors = _model_tensors(checkpoint, architecture, quant, merge)
    _check_stored(open_gguf(path), tensors)
    return (
        f"each of the {len(tensors)} tensors is W + s B A, or that of the base model, rounded once"
    )


def _check_stored(reader: gguf.GGUFReader, tensors: Sequence[_Tensor]) -> None:
    """Raises unless a file has exactly these tensors, with these types and values."""
    found = {tensor.name: tensor for tensor in reader.tensors}
    for one in tensors:
        stored = found.pop(one.name, None)
        # Exactly: a bound as large as the rounding would hide updates that are smaller than it.
        if (
            stored is None
            or stored.tensor_type != one.kind
            or stored.data.tobytes() != one.encoded().tobytes()
        ):
            raise WeightsMergeError(
                f"{one.name}: the file has other values than W + s B A rounded to "
                f"{one.kind.name.lower()}; nothing was written"
            )
    if found:
        raise WeightsMergeError(f"the file has tensors that the model lacks: {sorted(found)[:3]}")


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file; its values are read and encoded when they are needed."""

    name: str
    """Name in llama.cpp."""
    shape: list[int]
    kind: gguf.GGMLQuantizationType
    encoded: Callable[[], np.ndarray]


def _model_tensors(
    checkpoint: Checkpoint, architecture: Architecture, quant: str, merge: bool
) -> list[_Tensor]:
    from gguf import GGMLQuantizationType
    from safetensors import safe_open

    stored = {}
    for path in weight_files(checkpoint.base_folder):
        opened = safe_open(path, "pt")
        # Buffers in old files; llama.cpp computes them itself.
        names = (key for key in opened.keys() if not key.endswith("rotary_emb.inv_freq"))  # noqa: SIM118
        stored |= {key: opened.get_slice(key) for key in names}
    updates = checkpoint.updates if merge else {}
    if architecture.config.tie_word_embeddings:
        # Some files of tied models have a copy of the head, which loaders ignore.
        stored.pop(_HEAD_WEIGHT, None)
        if HEAD in updates:
            stored[_HEAD_WEIGHT] = stored[EMBEDDINGS]
    _check_updates(checkpoint, updates, stored)
    # 4 bits hurt the output matrix most; in a tied model it is also the embedding matrix.
    head = _HEAD_WEIGHT if _HEAD_WEIGHT in stored else EMBEDDINGS

    def planned(name: str) -> _Tensor:
        shape, update = stored[name].get_shape(), updates.get(name.removesuffix(".weight"))
        kind = _type_of(shape, "q8_0" if quant == "q4_0" and name == head else quant)

        def encoded() -> np.ndarray:
            tensor = stored[name][:].float()
            if update is not None:
                tensor = tensor + update.delta()
            return _encode(architecture.stored(name, tensor), kind, name)

        return _Tensor(architecture.tensor_name(name), shape, kind, encoded)

    tensors = [planned(name) for name in stored]
    factors = architecture.rope_factors()
    if factors is not None:
        values = factors.float().numpy()
        exact = GGMLQuantizationType.F32
        tensors.append(_Tensor(ROPE_FACTORS, list(values.shape), exact, lambda: values))
    return tensors


def write_adapter_file(checkpoint: Checkpoint, path: Path, quant: str) -> dict[str, str]:
    """Writes the adapter as a LoRA file of llama.cpp, in ``f32`` or ``f16``; returns facts.

    Raises:
        WeightsMergeError: llama.cpp lacks the architecture or one of the adapted modules.
    """
    import gguf

    architecture = Architecture.of(checkpoint.base_folder)
    tensors = _adapter_tensors(checkpoint, architecture, quant)
    with closing(gguf.GGUFWriter(path, architecture.name)) as writer:
        writer.add_type("adapter")
        _write_names(checkpoint, writer)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, _alpha(checkpoint))
        for one in tensors:
            writer.add_tensor(one.name, one.encoded(), raw_dtype=one.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return {"tensors": f"{len(tensors)} {quant.upper()}"}


def check_adapter_file(checkpoint: Checkpoint, path: Path, quant: str) -> str:
    """Checks that an adapter's file has exactly the factors of each update, like
    ``check_model_file``."""
    import gguf

    reader = open_gguf(path)
    alpha = reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
    if alpha != np.float32(_alpha(checkpoint)):
        raise WeightsMergeError(f"{path.name}: alpha is {alpha}, expected {_alpha(checkpoint)}")
    architecture = Architecture.of(checkpoint.base_folder)
    _check_stored(reader, _adapter_tensors(checkpoint, architecture, quant))
    return f"the factors of each of the {len(checkpoint.updates)} updates, rounded once"


def _alpha(checkpoint: Checkpoint) -> float:
    # llama.cpp scales each update by alpha / rank, with one alpha for all.
    first = next(iter(checkpoint.updates.values()))
    return first.scaling * len(first.a)


def _adapter_tensors(
    checkpoint: Checkpoint, architecture: Architecture, quant: str
) -> list[_Tensor]:
    """Returns the factors of each update."""
    import gguf

    kind, tensors = gguf.GGMLQuantizationType[quant.upper()], []
    for module, update in checkpoint.updates.items():
        name = architecture.tensor_name(f"{module}.weight")
        b = architecture.stored(f"{module}.lora_B", update.b)
        b = b * (update.scaling * len(update.a) / _alpha(checkpoint))
        for side, tensor in (("lora_a", update.a), ("lora_b", b)):
            encoded = partial(_encode, tensor, kind, f"{module}.{side}")
            tensors.append(_Tensor(f"{name}.{side}", list(tensor.shape), kind, encoded))
    return tensors


def _check_updates(
    checkpoint: Checkpoint, updates: Mapping[str, LowRankUpdate], stored: Mapping[str, Any]
) -> None:
    for module, update in updates.items():
        weight = stored.get(f"{module}.weight")
        shape = [update.b.shape[0], update.a.shape[1]]
        if weight is None or list(weight.get_shape()) != shape:
            found = "no such tensor" if weight is None else f"one of shape {weight.get_shape()}"
            raise WeightsMergeError(
                f"{checkpoint.name}: has an update of {module} with shape {shape}, but "
                f"{checkpoint.base_folder} has {found}; is {checkpoint.base_model} its base model?"
            )


def _write_names(checkpoint: Checkpoint, writer: gguf.GGUFWriter) -> None:
    writer.add_name(checkpoint.name)
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, checkpoint.base_model)


def _type_of(shape: Sequence[int], quant: str) -> gguf.GGMLQuantizationType:
    import gguf

    # Norms and biases are small, and llama.cpp applies them in float32.
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    kind = gguf.GGMLQuantizationType[quant.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    # Rows are quantized in blocks of 32.
    return kind if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _encode(tensor: Tensor, kind: gguf.GGMLQuantizationType, name: str) -> np.ndarray:
    from gguf.quants import quantize

    array = np.ascontiguousarray(tensor.numpy(), dtype=np.float32)
    with np.errstate(over="ignore"):
        encoded = quantize(array, kind)
    # Weights above 65504 become infinite in float16.
    if encoded.dtype in (np.float16, np.float32) and not np.isfinite(encoded).all():
        raise WeightsMergeError(
            f"{name}: a weight is not finite in {kind.name.lower()}; choose quant=bf16 or quant=f32"
        )
    return encoded


def read_model_file(path: Path, architecture: Architecture) -> Iterator[tuple[str, np.ndarray]]:
    """Yields llama.cpp's name and the float32 values of each tensor in a file."""
    from gguf.quants import dequantize

    for tensor in open_gguf(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF: the inner axis first
        yield tensor.name, dequantize(tensor.data, tensor.tensor_type).reshape(shape)
