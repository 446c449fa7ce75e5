"""Telling that memory ran out, and giving back what an allocator keeps in reserve."""

from __future__ import annotations

import torch

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory: CUDA has an exception for it, MPS and CPU only a text."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in _MESSAGES
    )


def release_cached_memory(device: torch.device) -> None:
    """Lets a smaller attempt use what the failed one left in the allocator's cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
