"""Splitting a batch into micro-batches under a token budget.

Rows are sorted by length, so that a micro-batch holds similar lengths and little padding. On a
CPU micro-batches are small (one or two dialogues), right-padded, and causal without a mask: that
kept its caches warm and ran twice as fast as one long packed row under a dense mask. Sequences that
share a prefix are laid out in one long row instead, without padding (see ``prefix_tree``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinker_cookbook.engine.training.prefix_tree import group_by_prefix, lay_out, row_length
from tinker_cookbook.engine.training.tree_attention import TreeLayout

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
    """Rows that run together; all of them are shared, or none is.

    With a ``group_size`` each run of so many sequences belongs together, in its order: a shared
    row is one such group, and other groups have a row for each sequence.
    """

    rows: tuple[Row, ...]
    group_size: int = 1

    @property
    def indices(self) -> tuple[int, ...]:
        """The sequences, in the order in which their tokens are concatenated."""
        return tuple(index for row in self.rows for index in row.indices)

    @property
    def padded_length(self) -> int:
        """Length of the longest row, rounded up so that few shapes occur.

        Kernels are made for a shape when it first occurs (half a millisecond and 0.6 MB each).
        """
        return _round_up(_longest(self.rows))

    @property
    def shared(self) -> bool:
        """Whether its rows are shared ones, which follow one another in a single row."""
        return self.rows[0].shared

    @property
    def padded_tokens(self) -> int:
        """What the forward pass computes."""
        if self.shared:
            return sum(row.length for row in self.rows)
        return len(self.rows) * self.padded_length

    def halves(self, sequences: Sequence[np.ndarray]) -> list[MicroBatch]:
        """Two smaller micro-batches, or an empty list where one sequence or group is left."""
        unit = 1 if self.shared else self.group_size
        if len(self.rows) > unit:
            middle = len(self.rows) // unit // 2 * unit
            parts = self.rows[:middle], self.rows[middle:]
            return [MicroBatch(rows, self.group_size) for rows in parts]
        if self.group_size > 1:
            return []
        indices = self.indices
        middle = len(indices) // 2
        parts = [part for part in (indices[:middle], indices[middle:]) if part]
        if len(parts) < 2:
            return []
        return [MicroBatch((Row(p, row_length([sequences[i] for i in p])),)) for p in parts]


def plan(
    sequences: Sequence[np.ndarray], token_budget: int, *, shared_budget: int = 0
) -> list[MicroBatch]:
    """Groups token sequences so that no group exceeds ``token_budget`` padded tokens.

    A row longer than the budget stands alone. Longest first: what does not fit into memory fails
    at the start, not after minutes. With a ``shared_budget`` sequences that begin alike may share
    a row of as many tokens, alone where it is over the other budget.
    """
    groups = [[index] for index in range(len(sequences))]
    if shared_budget and len(sequences) > 1:
        groups = group_by_prefix(sequences, shared_budget, enough=token_budget // 2)
    rows = [Row(tuple(group), row_length([sequences[i] for i in group])) for group in groups]
    alone = [(row,) for row in rows if not row.shared]
    return _packed([row for row in rows if row.shared], alone, token_budget, 1)


def plan_groups(
    sequences: Sequence[np.ndarray],
    group_size: int,
    token_budget: int,
    *,
    shared_budget: int = 0,
) -> list[MicroBatch]:
    """As ``plan``, but each ``group_size`` consecutive sequences stay together, in their order.

    A group gets a shared row of its own where its sequences begin alike and it has at most
    ``shared_budget`` tokens, else a padded row for each sequence. ``len(sequences)`` must be a
    multiple of ``group_size``.
    """
    if group_size == 1:
        return plan(sequences, token_budget, shared_budget=shared_budget)
    shared: list[Row] = []
    apart: list[tuple[Row, ...]] = []
    for start in range(0, len(sequences), group_size):
        members = tuple(range(start, start + group_size))
        own = [sequences[i] for i in members]
        if shared_budget and len(group_by_prefix(own, shared_budget)) < group_size:
            row = Row(members, row_length(own))
            if row.length <= shared_budget:
                shared.append(row)
                continue
        apart.append(tuple(Row((i,), len(sequences[i])) for i in members))
    return _packed(shared, apart, token_budget, group_size)


def _packed(
    shared: list[Row], apart: list[tuple[Row, ...]], token_budget: int, group_size: int
) -> list[MicroBatch]:
    """Micro-batches of shared rows, and of rows of one sequence, of which some stay together."""
    out: list[MicroBatch] = []
    for row in sorted(shared, key=lambda row: (-row.length, row.indices)):
        if out and out[-1].padded_tokens + row.length <= token_budget:
            out[-1] = MicroBatch((*out[-1].rows, row), group_size)
        else:
            out.append(MicroBatch((row,), group_size))
    apart = sorted(apart, key=lambda rows: (-_longest(rows), rows[0].indices))
    start = 0
    while start < len(apart):
        tokens = len(apart[start]) * _round_up(_longest(apart[start]))
        count = max(1, token_budget // tokens)
        rows = tuple(row for together in apart[start : start + count] for row in together)
        out.append(MicroBatch(rows, group_size))
        start += count
    return out


def _longest(rows: Sequence[Row]) -> int:
    return max(row.length for row in rows)


@dataclass(frozen=True)
class PaddedBatch:
    """Token rows and where the positions of the sequences lie.

    ``tokens`` [B, L]; ``flat`` [N] indexes the positions of all sequences, one after another, in
    the flattened [B * L] (with repetitions where a prefix is shared); ``sequence`` [N] numbers
    the sequence of each. ``positions`` [B, L] and ``tree`` are set if rows are shared; B is then 1.
    """

    tokens: torch.Tensor
    flat: torch.Tensor
    sequence: torch.Tensor
    positions: torch.Tensor | None = None
    tree: TreeLayout | None = None


def pad(micro: MicroBatch, sequences: Sequence[np.ndarray], device: torch.device) -> PaddedBatch:
    """Lays out a micro-batch. Rows are right-padded with id 0, which no real position can see.

    ``sequences`` are those of the whole batch.
    """
    lengths = [len(sequences[i]) for i in micro.indices]
    number_of = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
    if not micro.shared:
        length = micro.padded_length
        places = [
            np.arange(len(sequences[i])) + number * length for number, i in enumerate(micro.indices)
        ]
        rows = _stack([sequences[i] for i in micro.indices], length)
        tokens, flat = torch.from_numpy(rows), torch.from_numpy(np.concatenate(places))
        return PaddedBatch(tokens.to(device), flat.to(device), number_of)
    laid_out = [lay_out([sequences[i] for i in row.indices]) for row in micro.rows]
    starts = np.cumsum([0] + [len(row.tokens) for row in laid_out])
    flat = [where + at for row, at in zip(laid_out, starts, strict=False) for where in row.where]
    return PaddedBatch(
        concatenate([row.tokens for row in laid_out], torch.int64, device)[None],
        concatenate(flat, torch.int64, device),
        number_of,
        concatenate([row.positions for row in laid_out], torch.int64, device)[None],
        TreeLayout.of(laid_out, device),
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
