"""Attention over packed sequences in one row, some with shared prefixes (CUDA).

Sequences without shared prefixes use one call of a flash kernel. Shared prefixes (``prefix_tree``),
soft caps and sinks use a sparse kernel, which skips blocks that no query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tinker_cookbook.engine.kernels.cuda import attention
from tinker_cookbook.engine.model.attention_hook import AttentionCall
from tinker_cookbook.engine.training.prefix_tree import TreeRow

if TYPE_CHECKING:  # as in ``kernels.cuda.attention``
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Number of queries, and of keys, in a block; the sparse kernel computes or skips whole blocks."""


@dataclass(frozen=True)
class _Segment:
    """Tokens ``first`` to before ``end`` of a row; they start at ``position`` of their
    sequences. ``path`` has the indices of its ancestors and its own."""

    first: int
    end: int
    position: int
    path: tuple[int, ...]


class PackedLayout:
    """A row [T] in which each token sees the earlier tokens of its own sequences."""

    def __init__(self, segments: Sequence[_Segment], device: torch.device, *, shared: bool) -> None:
        self.windows_seen: dict[int, int | None] = {}
        """Sliding window of each layer that was called. The check at load reads it."""
        self._device = device
        self._segments = segments
        self._length = segments[-1].end
        self._shared = shared
        self._masks: dict[int | None, BlockMask] = {}

    @classmethod
    def of(cls, rows: Sequence[TreeRow], device: torch.device) -> PackedLayout:
        """Returns the layout of consecutive rows."""
        # Equal sequences share one segment. They use the sparse kernel too, because the check at
        # load may have refused the other one.
        shared = any(len(row.where) > 1 for row in rows)
        return cls(_segments(rows), device, shared=shared)

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns attention [T, heads, D]."""
        q, k, v = call.query, call.key, call.value
        plain = call.softcap is None and call.sinks is None and not self._shared
        if plain and attention.packs(q, v):
            bounds, longest = self._bounds
            return attention.packed_attention(q, k, v, bounds, longest, call.scale, call.window)
        mask = self._masks.get(call.window)
        if mask is None:
            mask = self._masks[call.window] = self._mask(call.window)
        return attention.sparse_attention(q, k, v, mask, call.scale, call.softcap, call.sinks)

    @cached_property
    def _bounds(self) -> tuple[Tensor, int]:
        """First tokens of the sequences, and the length of the longest sequence."""
        bounds = np.array([0, *(segment.end for segment in self._segments)], dtype=np.int32)
        return torch.from_numpy(bounds).to(self._device), int(np.diff(bounds).max())

    @cached_property
    def _places(self) -> Tensor:
        """[3, T]: a token's position, the index of its segment, and the index after the segment's
        last descendant."""
        # Segments are numbered depth first, so a segment's descendants are the
        # indices that follow its own.
        order = sorted(range(len(self._segments)), key=lambda i: self._segments[i].path)
        number = np.empty(len(order), dtype=np.int32)
        number[order] = np.arange(len(order))
        after = number + 1
        for index in reversed(order):
            for ancestor in self._segments[index].path:
                after[ancestor] = max(after[ancestor], after[index])
        places = np.empty((3, self._length), dtype=np.int32)
        for index, segment in enumerate(self._segments):
            at = slice(segment.first, segment.end)
            places[0, at] = segment.position + np.arange(segment.end - segment.first)
            places[1, at], places[2, at] = number[index], after[index]
        return torch.from_numpy(places).to(self._device)

    def _mask(self, window: int | None) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        some, whole = _blocks(self._segments, window)
        some &= ~whole
        # The forward pass needs the key blocks of each query block; the backward pass also the
        # reverse.
        indices = (*_listed(some), *_listed(whole), *_listed(some.T), *_listed(whole.T))
        return BlockMask(
            (self._length, self._length),
            *(torch.from_numpy(array).to(self._device) for array in indices),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=_visible(self._places, window),
        )


def _segments(rows: Sequence[TreeRow]) -> list[_Segment]:
    """Returns the segments of consecutive rows, in the order of their tokens."""
    out: list[_Segment] = []
    start = 0
    for row in rows:
        of_token: dict[int, int] = {}  # last token of a segment -> the segment's index
        for siblings in row.siblings:
            parent = out[of_token[int(siblings.path[-1])]].path if len(siblings.path) else ()
            for tokens in siblings.segments:
                first, end = int(tokens[0]), int(tokens[-1]) + 1
                of_token[end - 1] = len(out)
                path = (*parent, len(out))
                out.append(_Segment(start + first, start + end, len(siblings.path), path))
        start += len(row.tokens)
    return out


def _visible(places: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Returns the sparse kernel's mask function: whether query ``q`` sees key ``k``."""
    position, number, after = places.unbind()

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # A segment sees itself and its ancestors, up to the query's position.
        before = position[q] - position[k]
        seen = (number[k] <= number[q]) & (number[q] < after[k]) & (before >= 0)
        return seen if window is None else seen & (before < window)

    return visible


def _blocks(segments: Sequence[_Segment], window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns two [B, B] masks of query and key blocks: some pair is visible, all pairs are."""
    count = -(-segments[-1].end // BLOCK)
    some = np.zeros((count, count), dtype=bool)
    pairs = np.zeros((count, count), dtype=np.int64)
    for segment in segments:
        rows, q_count, q_low, q_high = _in_blocks(segment)
        for number in segment.path:
            other = segments[number]
            columns, k_count, k_low, k_high = _in_blocks(other)
            visible = np.outer(q_count, k_count)
            if other is segment:
                # A segment sees itself causally: blocks below the diagonal fully, diagonal blocks
                # partly.
                visible = np.tril(visible, -1)
                np.fill_diagonal(visible, q_count * (q_count + 1) // 2)
            reached = visible > 0
            if window is not None:
                reached &= q_low[:, None] - k_high < window
                # A block is full only if the window hides nothing in it.
                visible = np.where(q_high[:, None] - k_low < window, visible, 0)
            some[rows, columns] |= reached
            pairs[rows, columns] += visible
    return some, pairs == BLOCK * BLOCK


def _in_blocks(segment: _Segment) -> tuple[slice, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the blocks of a segment, and for each block: its tokens, first and last position."""
    blocks = slice(segment.first // BLOCK, (segment.end - 1) // BLOCK + 1)
    starts = np.arange(blocks.start, blocks.stop) * BLOCK
    first = np.maximum(starts, segment.first)
    end = np.minimum(starts + BLOCK, segment.end)
    low = segment.position + first - segment.first
    return blocks, end - first, low, low + end - first - 1


def _listed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of set blocks in each row [1, 1, B], and all blocks [1, 1, B, B], set
    ones first."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return blocks.sum(1, dtype=np.int32)[None, None], order[None, None]
