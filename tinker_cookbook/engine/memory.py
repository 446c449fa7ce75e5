"""Detects out-of-memory errors and frees memory that allocators hold in reserve."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass

import torch

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means out of memory: torch has an exception for CUDA and only a
    text for MPS and CPU; Python and numpy raise ``MemoryError``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@dataclass
class KnownLimits:
    """Limits found by out-of-memory errors while training a base model, shared by its runs.

    ``most_tokens``: half of the tokens of the smallest micro-batch that did not fit.
    ``recompute_from``: padded length from which a single row needed activation checkpointing.
    """

    most_tokens: int | None = None
    recompute_from: int | None = None

    def budget(self, tokens: int) -> int:
        """Returns ``tokens``, or the known limit if it is lower."""
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)

    def recomputes(self, tokens: int) -> bool:
        """Returns whether this many tokens need activation checkpointing."""
        return self.recompute_from is not None and tokens >= self.recompute_from

    def note_recomputed(self, tokens: int) -> None:
        """Records that this many tokens fitted only with activation checkpointing."""
        known = self.recompute_from
        self.recompute_from = tokens if known is None else min(known, tokens)


def release_cached_memory(device: torch.device) -> None:
    """Frees the allocator's reserve, for a smaller attempt or for other programs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    else:
        # The package makes glibc keep all free pages; this returns them to the operating system.
        with suppress(AttributeError, OSError, TypeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
