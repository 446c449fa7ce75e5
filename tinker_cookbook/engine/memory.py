"""Telling that memory ran out, and giving back what an allocator keeps in reserve."""

from __future__ import annotations

import ctypes

import torch

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has an exception for CUDA's, and only a text for MPS and CPU;
    Python and numpy raise ``MemoryError``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def release_cached_memory(device: torch.device) -> None:
    """Gives back what the allocator keeps: to a smaller attempt, or to the rest of the machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    else:
        _trim_heap()


def _trim_heap() -> None:
    """Returns free pages to the kernel; the package tells glibc to keep all it ever had."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return
    trim(0)
