"""Memory for packed weights and the KV cache in huge pages.

A product of few rows reads each weight once, at the memory's speed, and with pages of 4 KiB the
processor waits for addresses: the products of SmolLM2-135M with one row took 1.25 times as long.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_PAGE, _REGION = 2 << 20, 32 << 20

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)
"""What is left of the last region. Each tensor in a region keeps the whole of it."""


@torch.inference_mode(False)  # tensors of inference mode cannot be changed outside of it
def in_huge_pages(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor on the CPU, in huge pages where the system has them."""
    global _rest
    size = tensor.numel() * tensor.element_size()
    with _lock:
        # The rest of a region that is too small is never touched, so it takes no memory.
        if size > len(_rest):
            _rest = _region(max(size, _REGION))
        taken, _rest = _rest[:size], _rest[-(-size // 64) * 64 :]  # at the start of a cache line
    return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros of its own, which takes memory where it is written."""
    size = math.prod(shape) * dtype.itemsize
    return _region(size)[:size].view(dtype).view(*shape)


def _region(size: int) -> Tensor:
    # Private, because shared memory has huge pages only by another setting of the system.
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    if size >= _PAGE:
        with suppress(AttributeError, OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, size // _PAGE * _PAGE)
    return whole[start:]
