"""Telling that memory ran out, and giving back what an allocator keeps in reserve."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has an exception for CUDA's, and only a text for MPS and CPU;
    Python and numpy raise ``MemoryError``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@dataclass
class KnownLimits:
    """What running out of memory has taught about training a base model, for all its runs.

    ``most_tokens`` is what a micro-batch held at most when it did not fit, halved;
    ``recompute_from`` the length (padded tokens) at which what cannot be halved fitted only with
    its activations recomputed.
    """

    most_tokens: int | None = None
    recompute_from: int | None = None

    def budget(self, tokens: int) -> int:
        """``tokens``, or less where that is known to be too much."""
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)

    def recomputes(self, tokens: int) -> bool:
        """Whether so many tokens are known to fit only recomputed."""
        return self.recompute_from is not None and tokens >= self.recompute_from

    def note_recomputed(self, tokens: int) -> None:
        """So many tokens fitted only recomputed."""
        known = self.recompute_from
        self.recompute_from = tokens if known is None else min(known, tokens)


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
