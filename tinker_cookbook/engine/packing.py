"""Splitting a batch into micro-batches under a token budget.

Rows are sorted by length, so that a micro-batch holds similar lengths and little padding. On a
CPU micro-batches are small (one or two dialogues), right-padded, and causal without a mask: that
kept its caches warm and ran twice as fast as one long packed row under a dense mask. A mask is
built only where sequences share a prefix (see ``prefix_tree``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinker_cookbook.engine.prefix_tree import TreeRow, group_by_prefix, lay_out, row_length

_LENGTH_MULTIPLE = 8
_SHORT = 64


@dataclass(frozen=True)
class Row:
    """Indices of the sequences that share a row (mostly one), and the row's length."""

    indices: tuple[int, ...]
    length: int

    @property
    def shared(self) -> bool:
        """Whether it holds more than one sequence."""
        return len(self.indices) > 1


@dataclass(frozen=True)
class MicroBatch:
    """Rows that run together; all of them are shared, or none is."""

    rows: tuple[Row, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        """The sequences, in the order in which their tokens are concatenated."""
        return tuple(index for row in self.rows for index in row.indices)

    @property
    def padded_length(self) -> int:
        """Length of the longest row, rounded up so that few shapes occur.

        Kernels are made for a shape when it first occurs (half a millisecond and 0.6 MB each).
        """
        return _round_up(max(row.length for row in self.rows))

    @property
    def padded_tokens(self) -> int:
        """Rows times padded length: what the forward pass computes."""
        return len(self.rows) * self.padded_length

    def halves(self, sequences: Sequence[np.ndarray]) -> list[MicroBatch]:
        """Two smaller micro-batches, or an empty list where one sequence is all there is."""
        if len(self.rows) > 1:
            middle = len(self.rows) // 2
            return [MicroBatch(self.rows[:middle]), MicroBatch(self.rows[middle:])]
        indices = self.indices
        middle = len(indices) // 2
        parts = [part for part in (indices[:middle], indices[middle:]) if part]
        if len(parts) < 2:
            return []
        return [MicroBatch((Row(p, row_length([sequences[i] for i in p])),)) for p in parts]


def plan(
    sequences: Sequence[np.ndarray], token_budget: int, *, share_prefixes: bool = False
) -> list[MicroBatch]:
    """Groups token sequences so that no group exceeds ``token_budget`` padded tokens.

    A row longer than the budget stands alone. Longest first: what does not fit into memory fails
    at the start, not after minutes. With ``share_prefixes`` sequences that begin alike may share
    a row.
    """
    groups = [[index] for index in range(len(sequences))]
    if share_prefixes and len(sequences) > 1:
        groups = group_by_prefix(
            sequences, max_length=token_budget // _LENGTH_MULTIPLE * _LENGTH_MULTIPLE
        )
    rows = [Row(tuple(group), row_length([sequences[i] for i in group])) for group in groups]
    out: list[MicroBatch] = []
    for shared in (True, False):
        kind = [row for row in rows if row.shared == shared]
        kind.sort(key=lambda row: (-row.length, row.indices))
        start = 0
        while start < len(kind):
            count = max(1, token_budget // _round_up(kind[start].length))
            out.append(MicroBatch(tuple(kind[start : start + count])))
            start += count
    return out


@dataclass(frozen=True)
class PaddedBatch:
    """Token rows and where the positions of the sequences lie.

    ``tokens`` [B, L]; ``flat`` [N] indexes the positions of all sequences, one after another, in
    the flattened [B * L] (with repetitions where a prefix is shared); ``sequence`` [N] numbers
    the sequence of each. ``positions`` [B, L] and ``subtree_end`` [B, L] are set if rows are
    shared.
    """

    tokens: torch.Tensor
    flat: torch.Tensor
    sequence: torch.Tensor
    positions: torch.Tensor | None = None
    subtree_end: torch.Tensor | None = None

    def mask(self) -> torch.Tensor | None:
        """[B, 1, L, L], true where a query (row) sees a key (column); none if plainly causal."""
        if self.subtree_end is None:
            return None
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        query, key = index[:, None], index[None, :]
        return ((key <= query) & (query < self.subtree_end[:, None, :]))[:, None]


def pad(micro: MicroBatch, sequences: Sequence[np.ndarray], device: torch.device) -> PaddedBatch:
    """Lays out a micro-batch, right-padded with id 0, which no real position can see.

    ``sequences`` are those of the whole batch.
    """
    length = micro.padded_length
    laid_out = [lay_out([sequences[i] for i in row.indices]) for row in micro.rows]
    lengths = [len(sequences[i]) for i in micro.indices]
    flat = np.concatenate(
        [where + number * length for number, row in enumerate(laid_out) for where in row.where]
    )
    tokens = _stack([row.tokens for row in laid_out], length)
    number_of = np.repeat(np.arange(len(lengths)), lengths)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    if not any(row.shared for row in micro.rows):
        return PaddedBatch(put(tokens), put(flat), put(number_of))
    return PaddedBatch(
        put(tokens),
        put(flat),
        put(number_of),
        put(_stack([row.positions for row in laid_out], length)),
        put(_stack([_padded_ends(row, length) for row in laid_out], length)),
    )


def concatenate(
    arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """One tensor of several arrays along their first axis."""
    return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)


def _round_up(length: int) -> int:
    if length < _SHORT:  # padding would cost more than the kernels
        return length
    return -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def _stack(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    out = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return out


def _padded_ends(row: TreeRow, length: int) -> np.ndarray:
    """Padding sees itself: a query that sees nothing would make softmax return NaN."""
    return np.concatenate([row.subtree_end, np.arange(len(row.tokens) + 1, length + 1)])
