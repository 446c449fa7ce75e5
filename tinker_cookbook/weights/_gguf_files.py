"""Writes GGUF files: a merged model, or only the adapter.

Tensors are read, merged in float32, quantized and written one by one, so that only a few
are in memory at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.exceptions import ConfigurationError, WeightsMergeError, nearest
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights._chat_files import Chat, chat_of
from tinker_cookbook.weights._gguf_architectures import ROPE_FACTORS, Architecture
from tinker_cookbook.weights._gguf_tokenizer import vocabulary_of
from tinker_cookbook.weights._modules import HEAD
from tinker_cookbook.weights._source import Checkpoint, LowRankUpdate

if TYPE_CHECKING:
    import gguf
    from torch import Tensor

Watch = Callable[[str, int, int], None]
"""Called with a description of the work, the finished steps, and the number of all steps."""

QUANTS = ("f32", "f16", "bf16", "q8_0", "q4_0")
EMBEDDINGS = "model.embed_tokens.weight"
_HEAD_WEIGHT = f"{HEAD}.weight"
_INDEX = "model.safetensors.index.json"
_FILE_TYPES = {
    "f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}  # fmt: skip


@dataclass
class FileReport:
    """Statistics of a written file."""

    types: dict[str, int] = field(default_factory=dict)
    """Type -> number of tensors."""
    merged: int = 0
    """Tensors that the adapter changed."""
    untied: bool = False
    """Whether the head is stored separately although the base model ties it to the embeddings."""
    chat: dict[str, str] = field(default_factory=dict)
    """Facts about the chat template and the stops of a model's file."""


def check_quant(quant: str) -> str:
    """Returns ``quant`` in lower case; raises ``ConfigurationError`` for an unknown one."""
    if quant.lower() not in QUANTS:
        raise ConfigurationError(
            f"quant: got {quant!r}, expected one of {', '.join(QUANTS)}"
            f"{nearest(quant.lower(), QUANTS)}"
        )
    return quant.lower()


def write_model_file(
    checkpoint: Checkpoint,
    path: Path,
    quant: str,
    *,
    merge: bool = True,
    separate_head: bool = False,
    watch: Watch | None = None,
) -> FileReport:
    """Writes a model as GGUF.

    Args:
        checkpoint: The adapter, and the folder of its base model.
        path: File to write.
        quant: One of ``QUANTS``, for all matrices with rows that are multiples of its block.
        merge: Whether to merge the adapter; ``False`` writes only the base model.
        separate_head: Store the head separately from the embeddings even if nothing changes it: a
            LoRA file can change only a matrix that the base model's file has.
        watch: Called after each tensor.

    Raises:
        WeightsMergeError: llama.cpp lacks the architecture, or the adapter belongs to another
            model.
    """
    import gguf
    import torch

    report = FileReport()
    with _model_tensors(checkpoint, quant, merge, separate_head) as tensors:
        architecture, report.untied = tensors.architecture, tensors.untied
        writer = gguf.GGUFWriter(path, architecture.name)
        try:
            chat = chat_of(checkpoint)
            report.chat = chat.facts
            _write_metadata(checkpoint, writer, architecture, quant, chat)
            for name, kind in tensors.types.items():
                shape = tensors.stored[name].get_shape()
                _announce(writer, architecture.tensor_name(name), shape, kind)
                report.types[kind.name] = report.types.get(kind.name, 0) + 1
            factors = architecture.rope_factors()
            if factors is not None:
                kind = gguf.GGMLQuantizationType.F32
                _announce(writer, ROPE_FACTORS, list(factors.shape), kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            doing = f"writing {'the model' if merge else 'the base model'}, {quant}"
            for done, (name, kind) in enumerate(tensors.types.items(), start=1):
                # Copy: the mapped file is read-only, and the update is added in place.
                tensor = tensors.stored[name][:].to(torch.float32, copy=True)
                update = tensors.updates.get(name.removesuffix(".weight"))
                if update is not None:
                    tensor += update.delta()
                    report.merged += 1
                writer.write_tensor_data(_encode(architecture.stored(name, tensor), kind, name))
                if watch is not None:
                    watch(doing, done, len(tensors.types))
            if factors is not None:
                writer.write_tensor_data(factors.float().numpy())
        finally:
            writer.close()
    return report


def check_model_file(
    checkpoint: Checkpoint,
    path: Path,
    quant: str,
    *,
    merge: bool = True,
    separate_head: bool = False,
) -> str:
    """Checks that each tensor of a model's file is ``W + s B A`` (or ``W``), rounded to its type;
    returns a sentence for the proof. Reads one tensor after the other.

    Raises:
        WeightsMergeError: A tensor is missing, or has other values.
    """
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with _model_tensors(checkpoint, quant, merge, separate_head) as tensors:
        factors = tensors.architecture.rope_factors()
        if factors is not None:
            exact = gguf.GGMLQuantizationType.F32
            _check_stored(found, ROPE_FACTORS, exact, factors.float().numpy())
        for name, kind in tensors.types.items():
            expected = tensors.stored[name][:].float()
            update = tensors.updates.get(name.removesuffix(".weight"))
            if update is not None:
                expected = expected + update.delta()
            encoded = _encode(tensors.architecture.stored(name, expected), kind, name)
            _check_stored(found, tensors.architecture.tensor_name(name), kind, encoded)
        count = len(tensors.types)
    if found:
        raise WeightsMergeError(f"{path.name}: the model has no tensors {sorted(found)[:3]}")
    return f"each of the {count} tensors is W + s B A, or that of the base model, rounded once"


def _check_stored(
    found: dict[str, Any], name: str, kind: gguf.GGMLQuantizationType, encoded: np.ndarray
) -> None:
    """Removes a tensor from those of a file; raises unless it has this type and these values."""
    stored = found.pop(name, None)
    # Exactly: a bound as large as the rounding would hide updates that are smaller than it.
    if stored is None or stored.tensor_type != kind or stored.data.tobytes() != encoded.tobytes():
        raise WeightsMergeError(
            f"{name}: the file has other values than W + s B A rounded to {kind.name.lower()}; "
            "nothing was written"
        )


@dataclass(frozen=True)
class _ModelTensors:
    """Tensors of a model's file, by their names in transformers."""

    architecture: Architecture
    stored: dict[str, Any]
    """Slices of the base model's files."""
    updates: dict[str, LowRankUpdate]
    types: dict[str, gguf.GGMLQuantizationType]
    untied: bool


@contextmanager
def _model_tensors(
    checkpoint: Checkpoint, quant: str, merge: bool, separate_head: bool
) -> Iterator[_ModelTensors]:
    architecture = Architecture.of(checkpoint.base_folder)
    updates = dict(checkpoint.updates) if merge else {}
    with ExitStack() as files:
        stored = _stored_tensors(checkpoint.base_folder, files)
        tied = bool(architecture.config.tie_word_embeddings)
        if tied:
            # Some files of tied models have a copy of the head, which loaders ignore.
            stored.pop(_HEAD_WEIGHT, None)
        untied = tied and (HEAD in updates or separate_head)
        if untied:
            stored[_HEAD_WEIGHT] = stored[EMBEDDINGS]
        _check_updates(checkpoint, updates, stored)
        types = {
            name: _type_of(architecture.tensor_name(name), stored, name, quant) for name in stored
        }
        yield _ModelTensors(architecture, stored, updates, types, untied)


def write_adapter_file(checkpoint: Checkpoint, path: Path, quant: str) -> FileReport:
    """Writes the adapter as a LoRA file of llama.cpp.

    Args:
        checkpoint: The adapter, and the folder of its base model.
        path: File to write.
        quant: ``f32`` or ``f16``.

    Raises:
        WeightsMergeError: llama.cpp lacks the architecture or one of the adapted modules.
    """
    import gguf

    architecture = Architecture.of(checkpoint.base_folder)
    kind = gguf.GGMLQuantizationType[quant.upper()]
    report = FileReport()
    writer = gguf.GGUFWriter(path, architecture.name)
    try:
        writer.add_type("adapter")
        _write_names(checkpoint, writer)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, _alpha(checkpoint))
        for name, array in _adapter_tensors(checkpoint, architecture, kind):
            writer.add_tensor(name, array, raw_dtype=kind)
        report.types[kind.name] = 2 * len(checkpoint.updates)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return report


def check_adapter_file(checkpoint: Checkpoint, path: Path, quant: str) -> str:
    """Checks that an adapter's file has exactly the factors of each update, like
    ``check_model_file``."""
    import gguf

    architecture = Architecture.of(checkpoint.base_folder)
    kind, reader = gguf.GGMLQuantizationType[quant.upper()], gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    alpha = reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
    if alpha != np.float32(_alpha(checkpoint)):
        raise WeightsMergeError(f"{path.name}: alpha is {alpha}, expected {_alpha(checkpoint)}")
    for name, array in _adapter_tensors(checkpoint, architecture, kind):
        _check_stored(found, name, kind, array)
    if found:
        raise WeightsMergeError(f"{path.name}: the adapter has no tensors {sorted(found)[:3]}")
    return f"the factors of each of the {len(checkpoint.updates)} updates, rounded once"


def _alpha(checkpoint: Checkpoint) -> float:
    # llama.cpp scales each update by alpha / rank, with one alpha for all.
    first = next(iter(checkpoint.updates.values()))
    return first.scaling * len(first.a)


def _adapter_tensors(
    checkpoint: Checkpoint, architecture: Architecture, kind: gguf.GGMLQuantizationType
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields llama.cpp's name and the encoded values of each factor."""
    for module, update in checkpoint.updates.items():
        name = architecture.tensor_name(f"{module}.weight")
        b = architecture.stored(f"{module}.lora_B", update.b)
        b = b * (update.scaling * len(update.a) / _alpha(checkpoint))
        for side, tensor in (("a", update.a), ("b", b)):
            yield f"{name}.lora_{side}", _encode(tensor, kind, f"{module}.lora_{side}")


def _stored_tensors(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Returns the tensor slices of a model's safetensors files by name; ``files`` closes them."""
    from safetensors import safe_open

    index = folder / _INDEX
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    stored = {}
    for name in names:
        if not (folder / name).is_file():
            raise WeightsMergeError(
                f"{folder}: has no {name}; expected a model with safetensors files. Save it once "
                "with save_pretrained() of transformers"
            )
        opened = files.enter_context(safe_open(folder / name, "pt"))
        stored |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
    # Buffers in old files; llama.cpp computes them itself.
    return {key: one for key, one in stored.items() if not key.endswith("rotary_emb.inv_freq")}


def _check_updates(
    checkpoint: Checkpoint, updates: dict[str, LowRankUpdate], stored: dict[str, Any]
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


def _write_metadata(
    checkpoint: Checkpoint,
    writer: gguf.GGUFWriter,
    architecture: Architecture,
    quant: str,
    chat: Chat,
) -> None:
    import gguf

    writer.add_type("model")
    _write_names(checkpoint, writer)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[quant]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture.write(writer)
    tokenizer = get_tokenizer(str(checkpoint.base_folder))
    vocabulary_of(tokenizer, int(architecture.config.vocab_size), chat).write(writer)


def _type_of(
    name: str, stored: dict[str, Any], source: str, quant: str
) -> gguf.GGMLQuantizationType:
    """Returns the type of a tensor."""
    import gguf

    shape = stored[source].get_shape()
    # Norms and biases are small, and llama.cpp applies them in float32.
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    # 4 bits hurt the output matrix most; in a tied model it is also the embedding matrix.
    is_head = name == "output.weight" or (
        name == "token_embd.weight" and _HEAD_WEIGHT not in stored
    )
    kind = gguf.GGMLQuantizationType["Q8_0" if quant == "q4_0" and is_head else quant.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    # Rows are quantized in blocks of 32.
    return kind if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _announce(
    writer: gguf.GGUFWriter, name: str, shape: list[int], kind: gguf.GGMLQuantizationType
) -> None:
    """Adds a tensor's description to the file's header."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape))
    writer.add_tensor_info(name, shape, np.dtype(np.float32), count // block * size, kind)


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
    import gguf
    from gguf.quants import dequantize

    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF: the inner axis first
        yield tensor.name, dequantize(tensor.data, tensor.tensor_type).reshape(shape)
