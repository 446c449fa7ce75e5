"""Lays out sequences with common prefixes in one row, so that each prefix is computed once.

The sequences form a tree of segments. A group of eight samples of one prompt becomes
``[prompt | answer 1 | ... | answer 8]``; turns of a conversation that extend each other
become one path. Each segment attends to its path from the root and, causally, to itself. Segments
that continue the same path are ``Siblings``: attention treats them as a batch that shares the keys
of the path (``tree_attention``). Positions count along the path, so rotary embeddings are the same
as for the separate sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinker_cookbook.engine.vision.tower import VisionTower

MIN_SAVED_TOKENS = 32
MIN_SAVED_SHARE = 0.1
"""Minimum tokens that a shared row must save, because it needs extra copies in attention.

Two sequences of 256 tokens (135M parameters, a CPU) break even at 17 to 33 saved tokens of 512.
"""

SMALL_REPETITION = 0.15
"""Share of a row that the next row may compute again to keep rows short."""

SHORTEST_SEGMENT = 16
"""Fewer common tokens are not shared: a separate segment would cost more."""


@dataclass(frozen=True)
class Siblings:
    """Segments that continue the same ``path`` [P], both as indices of tokens in the row."""

    path: np.ndarray
    segments: list[np.ndarray]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest segment."""
        return max(map(len, self.segments))

    @property
    def scores(self) -> int:
        """Number of (query, key) pairs that attention computes for the siblings as a batch."""
        return len(self.segments) * self.longest * (len(self.path) + self.longest)


@dataclass(frozen=True)
class TreeRow:
    """One row [L]: token ids and positions. ``where[i]`` has the indices of sequence i's tokens.

    ``last_seen`` [L] is the last position that each token sees, if that is not its own.
    """

    tokens: np.ndarray
    positions: np.ndarray
    siblings: list[Siblings]
    where: list[np.ndarray]
    last_seen: np.ndarray | None = None


def group_by_prefix(
    sequences: Sequence[np.ndarray], max_length: int, enough: int | None = None
) -> list[list[int]]:
    """Partitions sequences into groups worth a shared row of at most ``max_length`` tokens.

    In lexicographic order, neighbours share the longest prefixes, so groups are runs of neighbours.
    A sequence joins if it shares ``MIN_SAVED_SHARE`` of its tokens with the previous one. From
    ``enough`` tokens on, a row also ends where the next row would repeat little
    (``SMALL_REPETITION``), since longer rows only need more memory. Groups that save too little are
    split again.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    row_length = saved = 0

    def close() -> None:
        # Number of tokens without sharing.
        total = row_length + saved
        if saved >= MIN_SAVED_TOKENS and saved >= MIN_SAVED_SHARE * total:
            groups.append(group)
        else:
            groups.extend([index] for index in group)

    for index in _sorted(sequences):
        length = len(sequences[index])
        common = common_prefix(sequences[group[-1]], sequences[index]) if group else 0
        common = max(0, common - SHORTEST_SEGMENT + 1)  # the row shares at least this many
        fits = row_length + length - common <= max_length
        # Extend a row that is long enough only for a prefix that is expensive to repeat.
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
    """Returns the shared row of ``sequences``, each with at least one token; common segments are
    shared from ``shortest`` tokens on."""
    tokens, positions, all_siblings, length = [], [], [], 0
    where: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    # The tree grows from the root. An entry has sorted sequences that continue the same ``path``
    # of ``depth`` tokens.
    stack = [(_sorted(sequences), 0, np.empty(0, dtype=np.int64))]
    while stack:
        members, depth, path = stack.pop()
        # 1. Neighbours that share enough further tokens form a family. The common segment ends
        #    where the first of them differs or ends.
        families: list[list[int]] = []
        ends: list[int] = []
        for number, member in enumerate(members):
            before = sequences[members[number - 1]]
            common = common_prefix(before, sequences[member]) if number else 0
            if number and common - depth >= shortest:
                families[-1].append(member)
                ends[-1] = min(ends[-1], common)
            else:
                families.append([member])
                ends.append(len(sequences[member]))
        # 2. The families' segments continue the same path, so they are siblings.
        siblings = Siblings(path, [])
        for family, end in zip(families, ends, strict=True):
            tokens.append(sequences[family[0]][depth:end])
            positions.append(np.arange(depth, end))
            siblings.segments.append(np.arange(length, length + end - depth))
            length += end - depth
        all_siblings.append(siblings)
        # 3. Members that end with the segment are complete; the others continue the extended path.
        rest = []
        for family, end, here in zip(families, ends, siblings.segments, strict=True):
            longer = np.concatenate([path, here])
            for member in family:
                if len(sequences[member]) == end:
                    where[member] = longer
            if longest := [member for member in family if len(sequences[member]) > end]:
                rest.append((longest, end, longer))
        # Reversed, so that the row keeps the sorted order of the sequences.
        stack.extend(reversed(rest))
    return TreeRow(np.concatenate(tokens), np.concatenate(positions), all_siblings, where)


def with_images(
    row: TreeRow, sequences: Sequence[np.ndarray], vision: VisionTower | None
) -> TreeRow:
    """Returns the row of ``sequences`` with their rotary positions [3, L] and the last token that
    each token sees, where images change these."""
    if vision is None:
        return row
    out, last_seen = row.positions, None
    for where, sequence in zip(row.where, sequences, strict=True):
        # Positions depend only on the tokens before, so sequences agree about a common prefix.
        if (positions := vision.positions(sequence)) is not None:
            out = np.broadcast_to(out, (3, out.shape[-1])).copy()
            out[:, where] = positions
        if (seen := vision.last_seen(sequence)) is not None:
            last_seen = row.positions.copy() if last_seen is None else last_seen
            # A sequence may end in an image that another one has whole.
            last_seen[where] = np.maximum(last_seen[where], seen)
    return replace(row, positions=out, last_seen=last_seen)


def row_length(sequences: Sequence[np.ndarray]) -> int:
    """Returns the number of tokens of the shared row of ``sequences``."""
    if len(sequences) == 1:  # the usual case: nothing to lay out
        return len(sequences[0])
    return len(lay_out(sequences).tokens)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the common prefix of two sequences."""
    shorter = min(len(a), len(b))
    # ``argmax`` finds the first difference, but also returns 0 if there is none.
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _sorted(sequences: Sequence[np.ndarray]) -> list[int]:
    """Returns the lexicographic order."""
    return sorted(range(len(sequences)), key=lambda i: token_bytes(sequences[i]))


def token_bytes(tokens: np.ndarray) -> bytes:
    """Returns tokens [T] as big-endian bytes, which sort in the same order as the tokens."""
    return tokens.astype(">i8").tobytes()
