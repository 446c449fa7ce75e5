"""Splitting a batch into micro-batches under a token budget.

Sequences are sorted by length, so that a micro-batch holds similar lengths and little padding.
On a CPU micro-batches are small (one or two dialogues), right-padded, and causal without a mask:
that kept its caches warm and ran twice as fast as one long packed row under a dense mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class MicroBatch:
    """Indices of the sequences that run together and their padded length."""

    indices: tuple[int, ...]
    padded_length: int

    @property
    def padded_tokens(self) -> int:
        """Rows times padded length: what the forward pass computes."""
        return len(self.indices) * self.padded_length


def plan(lengths: Sequence[int], token_budget: int) -> list[MicroBatch]:
    """Groups sequences of ``lengths`` so that no group exceeds ``token_budget`` padded tokens.

    A sequence longer than the budget stands alone. Longest first: what does not fit into memory
    fails at the start, not after minutes.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[MicroBatch] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        rows = max(1, token_budget // longest)
        members = tuple(order[start : start + rows])
        groups.append(MicroBatch(members, longest))
        start += len(members)
    return groups


@dataclass(frozen=True)
class PaddedBatch:
    """Token rows and where their real positions lie.

    ``tokens`` [B, L]; ``flat`` [N] indexes the real positions in the flattened [B * L];
    ``sequence`` [N] gives the row of each.
    """

    tokens: torch.Tensor
    flat: torch.Tensor
    sequence: torch.Tensor


def pad(rows: Sequence[np.ndarray], length: int, device: torch.device) -> PaddedBatch:
    """Right-pads token rows to ``length`` with id 0, which no real position can see."""
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    real = np.arange(length) < lengths[:, None]
    tokens[real] = np.concatenate(rows)
    return PaddedBatch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(np.flatnonzero(real)).to(device),
        torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)).to(device),
    )


def concatenate(
    arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """One tensor of several arrays along their first axis."""
    return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)
