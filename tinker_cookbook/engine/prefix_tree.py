"""Sequences that begin alike, laid out as one row: their common beginnings are computed once.

The sequences form a tree whose nodes are tokens. A row lists it in depth-first order, so the
subtree of a token is contiguous, and one number a token says everything about visibility::

    position i sees position j   iff   j <= i < subtree_end[j]

A group of eight samples of one prompt becomes ``[prompt | answer 1 | ... | answer 8]``; turns of a
conversation of which each extends the last become one path. Positions count along the path, so
rotary embeddings are those of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SAVED_TOKENS = 64
MIN_SAVED_SHARE = 0.25
"""A shared row needs a mask and so loses the causal kernel's shortcuts; it must save this much."""


@dataclass(frozen=True)
class TreeRow:
    """One row [L]: token ids, positions, subtree ends; ``where[i]`` maps sequence i to the row."""

    tokens: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray
    where: list[np.ndarray]


def group_by_prefix(sequences: Sequence[np.ndarray], max_length: int) -> list[list[int]]:
    """Partitions sequences into groups worth a shared row of at most ``max_length`` tokens.

    In lexicographic order neighbours share most, so a group is a run of neighbours; a sequence
    joins while it shares ``MIN_SAVED_SHARE`` of its tokens with the one before it. Groups that
    save too little are taken apart again.
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
        fits = row_length + length - common <= max_length
        if group and fits and common >= MIN_SAVED_SHARE * length:
            group.append(index)
            row_length, saved = row_length + length - common, saved + common
        else:
            close()
            group, row_length, saved = [index], length, 0
    close()
    return groups


def lay_out(sequences: Sequence[np.ndarray]) -> TreeRow:
    """The shared row of ``sequences``, each of at least one token."""
    order = sorted(range(len(sequences)), key=lambda i: _sort_key(sequences[i]))
    where: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    tokens, positions = [], []
    ends = np.zeros(sum(len(sequence) for sequence in sequences), dtype=np.int64)
    row_length = 0
    path = np.empty(0, dtype=np.int64)
    previous = np.empty(0, dtype=np.int64)
    for index in order:
        sequence = sequences[index]
        common = common_prefix(previous, sequence)
        ends[path[common:]] = row_length  # the branch that is left ends here
        added = len(sequence) - common
        path = np.concatenate([path[:common], np.arange(row_length, row_length + added)])
        tokens.append(sequence[common:])
        positions.append(np.arange(common, len(sequence)))
        row_length += added
        where[index], previous = path, sequence
    ends[path] = row_length
    return TreeRow(
        np.concatenate(tokens), np.concatenate(positions), ends[:row_length].copy(), where
    )


def row_length(sequences: Sequence[np.ndarray]) -> int:
    """Tokens of the shared row of ``sequences``."""
    return len(lay_out(sequences).tokens)


def _sort_key(sequence: np.ndarray) -> bytes:
    """Big-endian bytes of non-negative ids sort as the ids do."""
    return sequence.astype(">i8").tobytes()


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens at the beginning that two sequences have in common."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
