"""Whether a further base model fits into memory, said before it is loaded.

On a CPU too large a model does not fail: the kernel ends the process, and with it all runs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from tinker_cookbook.exceptions import OutOfMemoryError

logger = logging.getLogger(__name__)

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def weights_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Memory of a model's weights once they are held as ``dtype``.

    From the headers of safetensors files; of other files the size stands for it. An unembedding
    that shares its matrix with the embedding counts twice: it is laid out anew for products.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return sum(file.stat().st_size for file in folder.glob("pytorch_model*.bin"))
    shapes = {name: entry for file in files for name, entry in _header(file).items()}
    total = 0
    for entry in shapes.values():
        kind = entry["dtype"]
        item = dtype.itemsize if kind in _FLOATS else _ITEM_BYTES.get(kind, 1)
        total += prod(entry["shape"]) * item
    if not any("lm_head" in name or "embed_out" in name for name in shapes):
        tied = [e["shape"] for name, e in shapes.items() if "embed_tokens" in name or "wte" in name]
        total += sum(prod(shape) for shape in tied) * dtype.itemsize
    return total


def check_room(
    name: str,
    needed: int,
    loaded: Mapping[str, int],
    *,
    free: int,
    spare: int,
    where: str,
    dtype: torch.dtype,
) -> None:
    """Raises ``OutOfMemoryError`` unless a further model fits beside those that are loaded.

    Args:
        name: The model that is about to be loaded, of ``needed`` bytes.
        loaded: Bytes of those that are there, by name.
        free: Bytes that can still be allocated ``where`` (a device).
        spare: Bytes to be left to activations.
        dtype: In which all are held.
    """
    beside = ", ".join(f"{other!r} ({size_text(size)})" for other, size in loaded.items())
    if needed + spare > free:
        half = ", or hold them in half the memory with dtype=bfloat16" if dtype.itemsize > 2 else ""
        raise OutOfMemoryError(
            f"{name!r} needs {size_text(needed)} and {size_text(spare)} to compute with, but "
            f"{size_text(free)} are free on {where}, where {beside} is loaded already. Choose a "
            f"smaller model{half}"
        )
    logger.info(
        "Base models on %s: %s and %r (%s); that leaves %s.",
        where, beside, name, size_text(needed), size_text(free - needed),
    )  # fmt: skip


def _header(file: Path) -> dict[str, dict]:
    """Names, types and shapes of the tensors in a safetensors file."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header


def size_text(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
