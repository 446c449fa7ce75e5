"""Reads and writes safetensors files in blocks of rows, so that no whole tensor is in memory.

Format: https://huggingface.co/docs/safetensors. A file is the length of its header (8 bytes), the
header (JSON: name -> dtype, shape, offsets), and the values of the tensors one after another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tinker_cookbook.exceptions import WeightsMergeError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
BLOCK_BYTES = 8 << 20
"""Maximum bytes of a block in float32; a block has at least one row."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    dtype: str
    """Name in the header, such as ``BF16``."""
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row; a scalar has one row."""
        return self.shape[1:]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape[0] if self.shape else 1

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields blocks of rows [n, …] and their positions, in order."""
        dtype, row = DTYPES[self.dtype], prod(self.row_shape)
        step = max(1, BLOCK_BYTES // max(1, 4 * row))
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for start in range(0, self.rows, step):
                rows = slice(start, min(start + step, self.rows))
                count = (rows.stop - rows.start) * row
                # A bytearray, since torch warns about read-only memory.
                content = bytearray(count * dtype.itemsize)
                if file.readinto(content) != len(content):
                    raise WeightsMergeError(
                        f"{self.path}: ends within tensor {self.name!r}; the file is cut off, so "
                        "download the base model again"
                    )
                flat = torch.frombuffer(content, dtype=dtype) if count else torch.empty(0)
                yield rows, flat.view(-1, *self.row_shape)


@dataclass(frozen=True)
class NewTensor:
    """Name, dtype (as in a header) and shape of a tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name; reads no values.

    Raises:
        WeightsMergeError: The header cannot be read, or has a quantized dtype.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise WeightsMergeError(f"{path}: cannot be read as safetensors: {error}") from error
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise WeightsMergeError(
                f"{path}: tensor {name!r} has dtype {entry['dtype']}; merging into quantized "
                "weights is not supported: give the base model in bfloat16, float16 or float32"
            )
        offset = 8 + length + entry["data_offsets"][0]
        found[name] = StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), offset)
    return found


def write_file(path: Path, tensors: Iterable[tuple[NewTensor, Iterable[Tensor]]]) -> int:
    """Writes a safetensors file from tensors and their blocks of rows; returns its size in bytes.

    Blocks are consumed lazily, one tensor after the other.
    """
    # Widest dtypes first, like the safetensors library, so that each tensor begins
    # at a multiple of its item size.
    ordered = sorted(tensors, key=lambda one: (-DTYPES[one[0].dtype].itemsize, one[0].name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for new, _ in ordered:
        header[new.name] = {
            "dtype": new.dtype, "shape": new.shape, "data_offsets": (at, at + new.nbytes)
        }  # fmt: skip
        at += new.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for new, blocks in ordered:
            start = file.tell()
            for block in blocks:
                assert block.dtype == DTYPES[new.dtype]
                file.write(block.contiguous().view(-1).view(torch.uint8).numpy().data)
            assert file.tell() - start == new.nbytes, new.name
        file.flush()
        os.fsync(file.fileno())
        return file.tell()
