"""Splits a batch into micro-batches under a token budget.

Rows are sorted by length, so that a micro-batch has similar lengths and little padding. On a
CPU, micro-batches are small (one or two dialogues), right-padded, and causal without a mask: this
fits the processor's caches and was twice as fast as one long packed row with a dense mask.
Sequences that share a prefix are laid out in one long row instead, without padding (see
``prefix_tree``). On CUDA, all sequences of a micro-batch follow one another in one row (see
``packed_attention``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.model.attention_hook import Layout
from tinker_cookbook.engine.training.packed_attention import PackedLayout
from tinker_cookbook.engine.training.prefix_tree import (
    group_by_prefix,
    lay_out,
    row_length,
    with_images,
)
from tinker_cookbook.engine.training.tree_attention import TreeLayout
from tinker_cookbook.engine.vision.tower import VisionTower

_LENGTH_MULTIPLE = 8
_SHORT = 64


@dataclass(frozen=True)
class Row:
    """Indices of the sequences in a row (usually one), and the row's length."""

    indices: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows that run together. Either all of them are shared rows, or none is.

    With a ``group_size``, this many consecutive sequences form a group, in their order: a shared
    row is one group, and other groups have one row per sequence. ``packed`` rows are
    concatenated in one row, without padding, as shared rows always are.
    """

    rows: tuple[Row, ...]
    group_size: int = 1
    packed: bool = False

    @property
    def indices(self) -> tuple[int, ...]:
        """The sequences, in the order in which their tokens are concatenated."""
        return tuple(index for row in self.rows for index in row.indices)

    @property
    def shared(self) -> bool:
        """Whether each row holds several sequences; such rows are concatenated."""
        return len(self.rows[0].indices) > 1

    @property
    def padded_length(self) -> int:
        """Length of the longest row, rounded up to limit the number of shapes."""
        return _padded_length(self.rows)

    @property
    def row_tokens(self) -> list[int]:
        """Number of tokens per row in the forward pass, including padding."""
        if self.shared or self.packed:
            return [row.length for row in self.rows]
        return [self.padded_length] * len(self.rows)

    @property
    def padded_tokens(self) -> int:
        """Number of tokens that the forward pass computes."""
        return sum(self.row_tokens)

    def sorted_by(self, owners: np.ndarray) -> MicroBatch:
        """Returns the micro-batch with its rows sorted by owner, as grouped products need them."""
        rows = sorted(self.rows, key=lambda row: owners[row.indices[0]])
        return replace(self, rows=tuple(rows))

    def units(self) -> list[MicroBatch]:
        """Returns each row, or each group of rows, as a separate micro-batch."""
        size = 1 if self.shared else self.group_size
        starts = range(0, len(self.rows), size)
        return [MicroBatch(self.rows[at : at + size], self.group_size) for at in starts]

    def halves(self, sequences: Sequence[np.ndarray]) -> list[MicroBatch]:
        """Returns two smaller micro-batches; an empty list for a single sequence or group."""
        # A shared row is a whole group. Otherwise a group is ``group_size`` rows, which stay
        # together.
        unit = 1 if self.shared else self.group_size
        if len(self.rows) > unit:
            middle = len(self.rows) // unit // 2 * unit
            parts = self.rows[:middle], self.rows[middle:]
            return [replace(self, rows=rows) for rows in parts]
        if self.group_size > 1 or len(self.indices) < 2:
            return []
        # Split one shared row: both halves then compute the common prefix.
        middle = len(self.indices) // 2
        parts = self.indices[:middle], self.indices[middle:]
        rows = [Row(p, row_length([sequences[i] for i in p])) for p in parts]
        return [replace(self, rows=(row,)) for row in rows]


def plan(
    sequences: Sequence[np.ndarray],
    token_budget: int,
    *,
    group_size: int = 1,
    shared_budget: int = 0,
    packed: bool = False,
    owners: np.ndarray | None = None,
) -> list[MicroBatch]:
    """Groups token sequences so that no micro-batch exceeds ``token_budget`` padded tokens.

    A row longer than the budget is a micro-batch by itself. The longest rows come first, so that
    an out-of-memory error occurs at the start and not after minutes.

    Args:
        sequences: token ids [T] of each sequence.
        token_budget: padded tokens of a micro-batch.
        group_size: this many consecutive sequences stay together; divides their number.
        shared_budget: maximum tokens of a row in which sequences share a prefix; 0: no sharing.
        packed: whether other sequences are concatenated without padding.
        owners: index of each sequence's adapter [N]; all sequences of a row have the same owner.
            Only for groups of one.
    """
    # 1. Choose the sequences that share a row. ``apart`` has units of rows that must stay in
    # one micro-batch.
    shared: list[Row] = []
    apart: list[tuple[Row, ...]] = []
    if group_size == 1:
        groups = [[index] for index in range(len(sequences))]
        if shared_budget and len(sequences) > 1:
            # A short common prefix (a chat template) is not worth the memory of a longer row.
            enough = token_budget // 2
            groups = []
            for own in _by_owner(len(sequences), owners):
                found = group_by_prefix([sequences[i] for i in own], shared_budget, enough)
                groups += [[own[i] for i in group] for group in found]
        for group in groups:
            row = Row(tuple(group), row_length([sequences[i] for i in group]))
            if len(group) > 1:
                shared.append(row)
            else:
                apart.append((row,))
    else:
        # The loss needs whole groups: a group shares one row or has rows in one micro-batch.
        for start in range(0, len(sequences), group_size):
            members = tuple(range(start, start + group_size))
            tokens = [sequences[i] for i in members]
            if shared_budget and len(group_by_prefix(tokens, shared_budget)) < group_size:
                row = Row(members, row_length(tokens))
                if row.length <= shared_budget:
                    shared.append(row)
                    continue
            apart.append(tuple(Row((i,), len(sequences[i])) for i in members))
    # 2. Shared rows are concatenated without padding: fill each micro-batch up to the budget.
    # Indices break ties, so equal batches give equal plans, and a resumed run is bit-identical.
    shared.sort(key=lambda row: (-row.length, row.indices))
    empty = MicroBatch((), group_size, packed)
    out = _fill_batches([(row,) for row in shared], token_budget, empty)
    apart.sort(key=lambda rows: (-max(row.length for row in rows), rows[0].indices))
    if packed:
        return out + _fill_batches(apart, token_budget, empty)
    # 3. Other rows are padded to the longest row, which is the first one after sorting.
    start = 0
    while start < len(apart):
        count = max(1, token_budget // (len(apart[start]) * _padded_length(apart[start])))
        rows = tuple(row for unit in apart[start : start + count] for row in unit)
        out.append(MicroBatch(rows, group_size))
        start += count
    return out


def _by_owner(count: int, owners: np.ndarray | None) -> list[list[int]]:
    if owners is None:
        return [list(range(count))]
    return [np.flatnonzero(owners == owner).tolist() for owner in np.unique(owners)]


def _fill_batches(
    units: Sequence[tuple[Row, ...]], token_budget: int, empty: MicroBatch
) -> list[MicroBatch]:
    """Fills micro-batches like ``empty`` with consecutive units, as many as the budget
    allows without padding."""
    out: list[MicroBatch] = []
    for unit in units:
        tokens = sum(row.length for row in unit)
        if out and out[-1].padded_tokens + tokens <= token_budget:
            out[-1] = replace(empty, rows=(*out[-1].rows, *unit))
        else:
            out.append(replace(empty, rows=unit))
    return out


def _padded_length(rows: Sequence[Row]) -> int:
    # oneDNN compiles a kernel for each new shape (half a millisecond and 0.6 MB each).
    longest = max(row.length for row in rows)
    if longest < _SHORT:  # padding would cost more than new kernels
        return longest
    return -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


@dataclass(frozen=True)
class PaddedBatch:
    """Padded token rows, and the indices of each sequence's positions in them.

    ``tokens`` [B, L]; ``flat`` [N] indexes the positions of all sequences, one after another, in
    the flattened [B * L] (with repetitions where a prefix is shared); ``sequence`` [N] is the index
    of the sequence of each position. ``positions`` [B, L] and ``layout`` are set if rows are shared
    or packed; B is then 1. With images, ``positions`` may be [3, B, L].
    """

    tokens: Tensor
    flat: Tensor
    sequence: Tensor
    positions: Tensor | None = None
    layout: Layout | None = None


def pad(
    micro: MicroBatch,
    sequences: Sequence[np.ndarray],
    device: torch.device,
    shared_layout: type[PackedLayout | TreeLayout] = TreeLayout,
    vision: VisionTower | None = None,
) -> PaddedBatch:
    """Lays out a micro-batch of ``sequences``; rows with shared prefixes use ``shared_layout``.

    ``vision`` is the tower of a model that takes images.
    """
    chosen = [sequences[i] for i in micro.indices]
    lengths = [len(sequence) for sequence in chosen]
    number_of = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
    masked = vision is not None and any(vision.last_seen(one) is not None for one in chosen)
    if not (micro.shared or micro.packed or masked):
        # Pad on the right with id 0: no real position attends to it.
        tokens = np.zeros((len(lengths), micro.padded_length), dtype=np.int64)
        for row, sequence in zip(tokens, chosen, strict=True):
            row[: len(sequence)] = sequence
        is_token = np.arange(micro.padded_length) < np.array(lengths)[:, None]
        flat = torch.from_numpy(np.flatnonzero(is_token))
        positions = None if vision is None else _padded_positions(tokens.shape, chosen, vision)
        return PaddedBatch(
            torch.from_numpy(tokens).to(device),
            flat.to(device),
            number_of,
            None if positions is None else torch.from_numpy(positions).to(device),
        )
    # Concatenate the rows; ``layout`` separates them in attention.
    kind = TreeLayout if masked else shared_layout if micro.shared else PackedLayout
    of_rows = [[sequences[i] for i in row.indices] for row in micro.rows]
    laid_out = [with_images(lay_out(row), row, vision) for row in of_rows]
    starts = np.cumsum([0] + [len(row.tokens) for row in laid_out])
    flat = [where + at for row, at in zip(laid_out, starts, strict=False) for where in row.where]
    positions = [row.positions for row in laid_out]
    if any(part.ndim == 2 for part in positions):
        positions = [np.broadcast_to(part, (3, part.shape[-1])) for part in positions]
    return PaddedBatch(
        concatenate([row.tokens for row in laid_out], torch.int64, device)[None],
        concatenate(flat, torch.int64, device),
        number_of,
        torch.from_numpy(np.concatenate(positions, -1)).to(device)[..., None, :],
        kind.of(laid_out, device),
    )


def _padded_positions(
    shape: tuple[int, ...], sequences: Sequence[np.ndarray], vision: VisionTower
) -> np.ndarray | None:
    """Returns the positions [3, B, L] of padded rows; ``None`` if all count tokens."""
    found = [vision.positions(sequence) for sequence in sequences]
    if all(positions is None for positions in found):
        return None
    out = np.broadcast_to(np.arange(shape[1]), (3, *shape)).copy()
    for number, positions in enumerate(found):
        if positions is not None:
            out[:, number, : positions.shape[1]] = positions
    return out


def concatenate(arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns one tensor of several arrays, joined along their first axis."""
    return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)
