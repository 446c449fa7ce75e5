"""Memory for packed weights in huge pages.

A product of few rows reads each weight once, at the memory's speed, and with pages of 4 KiB the
processor waits for addresses: the products of SmolLM2-135M with one row took 1.25 times as long.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_PAGE = 2 << 20
_REGION = 32 << 20


class _Region:
    """Memory that is given away from the front; ``used`` in bytes. Each tensor in it keeps it."""

    def __init__(self, size: int) -> None:
        # Private, because shared memory has huge pages only by another setting of the system.
        memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._bytes = whole[-whole.data_ptr() % _PAGE :][:size]
        self.used = 0

    def take(self, size: int) -> Tensor | None:
        """Returns bytes [size] at the start of a cache line; ``None`` if too few are left."""
        first = self.used
        if first + size > len(self._bytes):
            return None
        self.used += -(-size // 64) * 64
        return self._bytes[first : first + size]


_current: list[_Region] = []
"""The region that is not full."""


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor on the CPU, where the system has huge pages in them."""
    size = tensor.numel() * tensor.element_size()
    if not (hasattr(mmap, "MADV_HUGEPAGE") and size):
        return tensor.contiguous()
    taken = _current[0].take(size) if _current else None
    if taken is None:
        # The rest of the last region is never touched, so it takes no memory.
        _current[:] = [_Region(max(size, _REGION))]
        taken = _current[0].take(size)
        assert taken is not None
    return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)
