"""Detects out-of-memory errors and frees memory that allocators hold in reserve."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass, field

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
    ``recomputed``: number of tokens of a row -> share of the layers that had to be recomputed
    (activation checkpointing) for it to fit.
    """

    most_tokens: int | None = None
    recomputed: dict[int, float] = field(default_factory=dict)

    def budget(self, tokens: int) -> int:
        """Returns ``tokens``, or the known limit if it is lower."""
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)

    def recomputed_share(self, tokens: int) -> float:
        """Returns the share of layers to recompute for this many tokens: what as many or fewer
        needed."""
        return max((share for most, share in self.recomputed.items() if most <= tokens), default=0)

    def note_recomputed(self, tokens: int, share: float) -> None:
        """Records that this many tokens fitted only with a share of the layers recomputed."""
        self.recomputed[tokens] = max(share, self.recomputed.get(tokens, 0))


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
