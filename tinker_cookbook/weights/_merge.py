"""Merges an adapter into its base model, in float32, reading the base model's files.

Files are read, changed and written in blocks of rows, to bound the memory. If an adapter updates a
head that shares its matrix with the input embeddings, the head gets a separate matrix: merging into
the shared one would change the embeddings too.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinker_cookbook.engine.model.loading import model_class
from tinker_cookbook.engine.model.resolve import model_config
from tinker_cookbook.exceptions import ConfigurationError, WeightsMergeError, nearest
from tinker_cookbook.weights._experts import by_file
from tinker_cookbook.weights._modules import HEAD, stored_names
from tinker_cookbook.weights._source import Checkpoint, LowRankUpdate
from tinker_cookbook.weights._tensor_files import (
    DTYPES,
    FLOATS,
    NewTensor,
    StoredTensor,
    read_header,
    write_file,
)

MERGE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
WEIGHTS_INDEX = "model.safetensors.index.json"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*", "NOTICE*")
_NOT_COPIED = ("config.json", "copy.json", "README.md")


@dataclass
class MergeReport:
    """Statistics of a merge."""

    tensors: int = 0
    merged: int = 0
    """Tensors that the adapter changed."""
    bytes: int = 0
    untied: bool = False
    """Whether the head got a separate matrix."""
    largest_change: float = 0.0
    """Largest change of a weight by the adapter."""
    largest_rounding: float = 0.0
    """Largest difference of a changed weight between float32 and the dtype of the files."""
    rounding_of: str = ""
    """Tensor with that difference."""
    peak_bytes: int = 0
    """Peak resident memory of the process so far."""

    def rounded(self, name: str, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns weights in another dtype, and records the largest rounding.

        Raises:
            WeightsMergeError: A weight is not finite.
        """
        rounded = weights.to(dtype)
        if weights.is_floating_point() and dtype != weights.dtype and weights.numel():
            largest = (rounded.to(weights.dtype) - weights).abs().max().item()
            if not largest < float("inf"):  # also catches NaN
                raise WeightsMergeError(
                    f"{name}: a weight is not finite in {str(dtype)[6:]}; choose dtype=bfloat16 "
                    "or dtype=float32"
                )
            if largest > self.largest_rounding:
                self.largest_rounding, self.rounding_of = largest, name
        return rounded

    def facts(self, dtype: str) -> dict[str, str]:
        """Returns the report as texts for the proof and the card."""
        facts = {
            "changed tensors": f"{self.merged} of {self.tensors}",
            "size": f"{self.bytes / 2**20:.1f} MiB",
            "largest change of a weight": f"{self.largest_change:.2e}",
            f"largest rounding to {dtype}": f"{self.largest_rounding:.2e}"
            + (f" ({self.rounding_of})" if self.rounding_of else ""),
            "peak memory of the merge": f"{self.peak_bytes / 2**20:.0f} MiB",
        }
        if self.untied:
            facts["head"] = (
                "separated from the input embeddings (tie_word_embeddings is false), because the "
                "adapter changes only the head"
            )
        return facts


@dataclass(frozen=True)
class _Planned:
    """A tensor of the merged model, with its source and its update."""

    new: NewTensor
    source: StoredTensor
    update: LowRankUpdate | None = None


@dataclass
class _Plan:
    files: dict[str, list[_Planned]] = field(default_factory=dict)
    untied: bool = False


def check_merge_dtype(dtype: str) -> str:
    """Returns ``dtype``; raises ``ConfigurationError`` for an unknown one, with the nearest
    name."""
    if dtype not in MERGE_DTYPES:
        raise ConfigurationError(
            f"dtype: got {dtype!r}, expected one of {', '.join(MERGE_DTYPES)}"
            f"{nearest(dtype, MERGE_DTYPES)}"
        )
    return dtype


def merge_files(checkpoint: Checkpoint, out: Path, dtype: str) -> MergeReport:
    """Writes the merged model into the existing folder ``out``.

    Args:
        checkpoint: Adapter and folder of its base model, with safetensors files.
        out: Receives weights, ``config.json`` and the tokenizer's files.
        dtype: ``float32``, ``bfloat16`` or ``float16``, of all float tensors. Tensors that the base
            model stores in float32, while most are in half precision, stay in float32.

    Raises:
        WeightsMergeError: The adapter does not fit the base model, or that is quantized.
    """
    folder = checkpoint.base_folder
    config = model_config(folder)
    plan = _plan_merge(checkpoint, config, dtype)
    report = MergeReport(untied=plan.untied)
    weight_map = {}
    for name, planned in plan.files.items():
        sources = [(one.new, _merged_blocks(one, report)) for one in planned]
        report.bytes += write_file(out / name, sources)
        report.tensors += len(planned)
        report.merged += sum(one.update is not None for one in planned)
        weight_map |= {one.new.name: name for one in planned}
    if len(plan.files) > 1 or (folder / WEIGHTS_INDEX).is_file():
        total = sum(one.new.nbytes for planned in plan.files.values() for one in planned)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    write_config(config, out, dtype, plan.untied)
    copy_small_files(folder, out)
    report.peak_bytes = peak_memory_bytes()
    return report


def check_merged_files(checkpoint: Checkpoint, out: Path, dtype: str) -> int:
    """Checks that each tensor in the files of ``out`` is ``W + s B A`` (or ``W``), rounded once to
    its dtype; returns their number. Reads both models in blocks of rows.

    Raises:
        WeightsMergeError: A tensor is missing, or has other values.
    """
    folder, count = checkpoint.base_folder, 0
    for file, planned in _plan_merge(checkpoint, model_config(folder), dtype).files.items():
        written = read_header(out / file)
        for one in planned:
            found = written.pop(one.new.name, None)
            if found is None or (found.dtype, found.shape) != (one.new.dtype, one.new.shape):
                raise WeightsMergeError(
                    f"{one.new.name}: {file} has {found}, expected {one.new}; the export was not "
                    "kept"
                )
            blocks = zip(found.blocks(), one.source.blocks(), strict=True)
            for (rows, stored), (_, expected) in blocks:
                if one.update is not None:
                    b, a = one.update.b[rows], one.update.a
                    expected = expected + (b @ a) * one.update.scaling
                check_stored(one.new.name, stored, expected)
            count += 1
        if written:
            raise WeightsMergeError(f"{file}: has tensors that the model lacks: {sorted(written)}")
    return count


def check_stored(name: str, stored: Tensor, expected: Tensor) -> None:
    """Raises ``WeightsMergeError`` unless stored values are the expected ones, rounded once."""
    # Exactly: a bound as large as the rounding would hide updates that are smaller than it.
    if not torch.equal(stored, expected.to(stored.dtype)):
        raise WeightsMergeError(
            f"{name}: the merged model has weights other than W + s B A rounded to "
            f"{str(stored.dtype)[6:]}; the export was not kept"
        )


def _plan_merge(checkpoint: Checkpoint, config: Mapping[str, Any], dtype: str) -> _Plan:
    """Maps each update to a tensor of a file; reads only the headers."""
    folder, source = checkpoint.base_folder, checkpoint.name
    if config.get("quantization_config"):
        raise WeightsMergeError(
            f"{folder}: the base model is quantized; merging into quantized weights is not "
            "supported: give base_model in bfloat16, float16 or float32"
        )
    files = {path.name: read_header(path) for path in weight_files(folder)}
    stored = {name: one for tensors in files.values() for name, one in tensors.items()}
    kept = _kept_in_float32(stored)
    changes: dict[str, LowRankUpdate] = {}
    plan = _Plan()
    updates = by_file(checkpoint.updates, stored, source)
    untied = {HEAD} if is_tied(folder) else set()
    names = stored_names(folder, stored, [f"{module}.weight" for module in updates.keys() - untied])
    for module, update in updates.items():
        unties = module in untied
        target = _embedding_of(stored, folder) if unties else names.get(f"{module}.weight")
        if target is None:
            raise WeightsMergeError(
                f"{source}: has an update of {module}, but {folder} has no tensor "
                f"{module}.weight; is {checkpoint.base_model} its base model?"
            )
        shape = (update.b.shape[0], update.a.shape[1])
        if stored[target].shape != shape:
            raise WeightsMergeError(
                f"{source}: the update of {module} has shape {shape}, but {target} of {folder} has "
                f"{stored[target].shape}; {checkpoint.base_model} is not its base model"
            )
        plan.untied |= unties
        changes[HEAD if unties else target] = update
    for file, tensors in files.items():
        planned = plan.files[file] = []
        for name, one in tensors.items():
            if plan.untied and name == names.get(f"{HEAD}.weight"):
                continue  # a copy of a tied head, which loaders ignore
            wanted = MERGE_DTYPES[dtype] if one.dtype in FLOATS and name not in kept else one.dtype
            planned.append(_Planned(NewTensor(name, wanted, one.shape), one, changes.get(name)))
            if plan.untied and name == _embedding_of(stored, folder):
                head = NewTensor(f"{HEAD}.weight", wanted, one.shape)
                planned.append(_Planned(head, one, changes[HEAD]))
    return plan


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model; with an index, the files in it."""
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    else:
        names = ["model.safetensors"] if (folder / "model.safetensors").is_file() else []
    if not names:
        raise WeightsMergeError(
            f"{folder}: has no safetensors files; save it with save_pretrained() of transformers, "
            "or merge with merge_strategy=full, which loads the base model with transformers"
        )
    return [folder / name for name in names]


def is_tied(folder: Path) -> bool:
    """Returns whether a model ties its head to the input embeddings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # Not read from config.json: if the key is missing, the architecture's default applies.
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # transformers reads it from the configuration of the model that has the head.
    if model_class(folder) is AutoModelForCausalLM:
        config = config.get_text_config()
    return bool(getattr(config, "tie_word_embeddings", False))


def loaded_model(folder: Path) -> Any:
    """Returns a model in float32."""
    return model_class(folder).from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def _kept_in_float32(stored: Mapping[str, StoredTensor]) -> set[str]:
    # Some models need float32 for routers and norms, and store them in float32.
    sizes: Counter[str] = Counter()
    for one in stored.values():
        sizes[one.dtype] += prod(one.shape)
    if not sizes or sizes.most_common(1)[0][0] == "F32":
        return set()
    return {name for name, one in stored.items() if one.dtype == "F32"}


def _embedding_of(stored: Mapping[str, StoredTensor], folder: Path) -> str:
    found = [name for name in stored if name.endswith(_EMBEDDINGS)]
    if len(found) != 1:
        raise WeightsMergeError(
            f"{folder}: expected one tensor of input embeddings, found {found or 'none'}"
        )
    return found[0]


def _merged_blocks(planned: _Planned, report: MergeReport) -> Iterator[Tensor]:
    """Yields the blocks of a merged tensor in the dtype of its file."""
    dtype, update = DTYPES[planned.new.dtype], planned.update
    for rows, block in planned.source.blocks():
        if update is None:
            changed = block
        else:
            # Add in float32 and round once.
            delta = (update.b[rows] @ update.a).mul_(update.scaling)
            report.largest_change = max(report.largest_change, delta.abs().max().item())
            changed = delta.add_(block)
        yield report.rounded(planned.new.name, changed, dtype)


def write_config(config: Mapping[str, Any], out: Path, dtype: str, untied: bool) -> None:
    """Writes ``config.json`` of a merged model."""
    written = dict(config)
    # Newer versions of transformers write "dtype" and read both keys.
    written.pop("torch_dtype", None)
    written["dtype"] = dtype
    for name in ("text_config", "vision_config"):
        if isinstance(config.get(name), dict):
            part = {key: value for key, value in config[name].items() if "dtype" not in key}
            written[name] = {**part, "dtype": dtype}
    if untied:
        written["tie_word_embeddings"] = False
        if isinstance(config.get("text_config"), dict):
            written["text_config"]["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(written, indent=2, ensure_ascii=False))


def copy_small_files(folder: Path, out: Path) -> None:
    """Copies tokenizer, chat template, generation settings, code and licence of a base model."""
    for pattern in _COPIED:
        for path in sorted(folder.glob(pattern)):
            if path.name not in _NOT_COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, out / path.name)


def peak_memory_bytes() -> int:
    """Returns the peak resident memory of this process so far; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
