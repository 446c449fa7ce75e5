"""Sequences that begin alike, laid out as one row: their common beginnings are computed once.

The sequences form a tree of segments. A group of eight samples of one prompt becomes
``[prompt | answer 1 | ... | answer 8]``; turns of a conversation of which each extends the last
become one path. Each segment sees the path from the root to it and, causally, itself. Segments that
continue the same path are ``Siblings``: attention treats them as a batch that shares the keys of
the path (``tree_attention``). Positions count along the path, so rotary embeddings are those of
the sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MIN_SAVED_TOKENS = 32
MIN_SAVED_SHARE = 0.1
"""A shared row costs some copying in attention; it must save this much.

Two sequences of 256 tokens (135M parameters, a CPU) break even at 17 to 33 saved tokens of 512.
"""

SMALL_REPETITION = 0.15
"""Share of a row that the next may compute again, where that keeps rows short."""

SHORTEST_SEGMENT = 16
"""Fewer common tokens are computed for each sequence: a segment of its own would cost more."""


@dataclass(frozen=True)
class Siblings:
    """Segments that continue the same ``path`` [P]; ``places`` has those of each one's tokens."""

    path: np.ndarray
    places: list[np.ndarray]

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(map(len, self.places))

    @property
    def scores(self) -> int:
        """Pairs of query and key that attention computes for them as a batch."""
        return len(self.places) * self.longest * (len(self.path) + self.longest)


@dataclass(frozen=True)
class TreeRow:
    """One row [L]: token ids and positions; ``where[i]`` maps sequence i to places in the row."""

    tokens: np.ndarray
    positions: np.ndarray
    siblings: list[Siblings]
    where: list[np.ndarray]


def group_by_prefix(
    sequences: Sequence[np.ndarray], max_length: int, enough: int | None = None
) -> list[list[int]]:
    """Partitions sequences into groups worth a shared row of at most ``max_length`` tokens.

    In lexicographic order neighbours share most, so a group is a run of neighbours; a sequence
    joins while it shares ``MIN_SAVED_SHARE`` of its tokens with the one before it. From ``enough``
    tokens on, a row also ends where the next computes little again (``SMALL_REPETITION``): longer
    ones would only take memory. Groups that save too little are taken apart again.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    row_length = saved = 0

    def close() -> None:
        total = row_length + saved
        if saved >= MIN_SAVED_TOKENS and saved >= MIN_SAVED_SHARE * total:
            groups.append(group)
        else:
            groups.extend([index] for index in group)

    for index in sorted(range(len(sequences)), key=lambda i: _sort_key(sequences[i])):
        length = len(sequences[index])
        common = common_prefix(sequences[group[-1]], sequences[index]) if group else 0
        common = max(0, common - SHORTEST_SEGMENT + 1)  # what the row will share at the least
        fits = row_length + length - common <= max_length
        if enough is not None and row_length >= enough:
            fits = fits and common > SMALL_REPETITION * row_length
        if group and fits and common >= MIN_SAVED_SHARE * length:
            group.append(index)
            row_length, saved = row_length + length - common, saved + common
        else:
            close()
            group, row_length, saved = [index], length, 0
    close()
    return groups


def lay_out(sequences: Sequence[np.ndarray], shortest: int = SHORTEST_SEGMENT) -> TreeRow:
    """Returns the shared row of ``sequences``, each of at least one token."""
    tree = _Tree(sequences, shortest)
    order = sorted(range(len(sequences)), key=lambda i: _sort_key(sequences[i]))
    tree.grow(order, 0, np.empty(0, dtype=np.int64))
    return TreeRow(
        np.concatenate(tree.tokens), np.concatenate(tree.positions), tree.siblings, tree.where
    )


class _Tree:
    """The row as it grows, from the root on."""

    def __init__(self, sequences: Sequence[np.ndarray], shortest: int) -> None:
        self._sequences, self._shortest = sequences, shortest
        self._length = 0
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.siblings: list[Siblings] = []
        self.where: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)

    def grow(self, members: list[int], depth: int, path: np.ndarray) -> None:
        """Adds what follows ``path`` in ``members``, sorted sequences longer than ``depth``."""
        places, families = [], self._families(members, depth)
        for family, end in families:
            here = np.arange(self._length, self._length + end - depth)
            self._length += end - depth
            self.tokens.append(self._sequences[family[0]][depth:end])
            self.positions.append(np.arange(depth, end))
            places.append(here)
        self.siblings.append(Siblings(path, places))
        for (family, end), here in zip(families, places, strict=True):
            longer = np.concatenate([path, here])
            for member in family:
                if len(self._sequences[member]) == end:
                    self.where[member] = longer
            rest = [member for member in family if len(self._sequences[member]) > end]
            if rest:
                self.grow(rest, end, longer)

    def _families(self, members: list[int], depth: int) -> list[tuple[list[int], int]]:
        """Runs of sorted sequences with a common segment, and the depth at which it ends."""
        out: list[tuple[list[int], int]] = []
        family, end = [members[0]], len(self._sequences[members[0]])
        for before, member in pairwise(members):
            common = common_prefix(self._sequences[before], self._sequences[member])
            if common - depth >= self._shortest:
                family.append(member)
                end = min(end, common)
            else:
                out.append((family, end))
                family, end = [member], len(self._sequences[member])
        out.append((family, end))
        return out


def row_length(sequences: Sequence[np.ndarray]) -> int:
    """Tokens of the shared row of ``sequences``."""
    if len(sequences) == 1:  # most rows of a batch: nothing to lay out
        return len(sequences[0])
    return len(lay_out(sequences).tokens)


def _sort_key(sequence: np.ndarray) -> bytes:
    """Big-endian bytes of non-negative ids sort as the ids do."""
    return sequence.astype(">i8").tobytes()


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens at the beginning that two sequences have in common."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
