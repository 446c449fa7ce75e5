"""Pairs of a group's answers for a judge, and the score of each answer.

A preference is a number from -1 (the first is better) to 1 (the second is better); 0 is a tie. A
judge with probabilities gives ``P(second) - P(first)``, which counts as a fraction of a win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, nearest

__all__ = ["TournamentPattern", "get_pairs", "get_pairs_chunked", "mean_wins_minus_losses"]


class TournamentPattern(StrEnum):
    """Pairs of a group to compare."""

    ALL_PAIRS_BOTH_WAYS = "all_pairs_both_ways"
    """Each pair in both orders, so that the judge's position bias cancels."""
    ALL_PAIRS_ONE_WAY = "all_pairs_one_way"
    """Each pair once, the earlier member first, at half the cost."""


def get_pairs(n: int, pattern: TournamentPattern) -> list[tuple[int, int]]:
    """Returns the pairs (first, second) among ``n`` members."""
    if pattern not in tuple(TournamentPattern):
        names = [str(known) for known in TournamentPattern]
        raise ConfigurationError(
            f"tournament_pattern: got {pattern!r}, expected one of {', '.join(names)}"
            f"{nearest(str(pattern), names)}"
        )
    both = pattern == TournamentPattern.ALL_PAIRS_BOTH_WAYS
    return [(i, j) for i in range(n) for j in range(n) if (i != j if both else i < j)]


def get_pairs_chunked(n: int, pattern: TournamentPattern, chunk_size: int) -> list[tuple[int, int]]:
    """Returns the pairs within chunks of at most ``chunk_size`` of ``n`` members.

    The number of comparisons grows with ``n`` instead of its square. The sizes of chunks differ by
    at most one, so that each member has an opponent: five members in chunks of four are two and
    three. (With a chunk size of 2, an odd ``n`` has one chunk of three.)
    """
    if chunk_size < 2:
        raise ConfigurationError(
            f"matchup_group_size: got {chunk_size}, expected at least 2, as one has no opponent"
        )
    # At least two members in each chunk, and at least one chunk.
    num_chunks = max(1, min(math.ceil(n / chunk_size), n // 2))
    bounds = [n * k // num_chunks for k in range(num_chunks + 1)]
    return [
        (start + i, start + j)
        for start, end in pairwise(bounds)
        for i, j in get_pairs(end - start, pattern)
    ]


def mean_wins_minus_losses(
    n: int, pairs: Sequence[tuple[int, int]], preferences: Sequence[float]
) -> list[float]:
    """Returns ``(wins - losses) / matchups`` for each of ``n`` members, from -1 to 1.

    ``preferences[k]`` belongs to ``pairs[k]``. A member without a matchup gets 0. If all members
    have the same number of matchups, the values sum to 0.
    """
    if len(pairs) != len(preferences):
        raise DataValidationError(
            f"preferences: got {len(preferences)}, expected {len(pairs)}, one per pair"
        )
    balance, matchups = [0.0] * n, [0] * n
    for (first, second), preference in zip(pairs, preferences, strict=True):
        if not -1 <= preference <= 1:  # false for NaN as well
            raise DataValidationError(
                f"preference between answers {first} and {second}: got {preference}, expected a "
                "number from -1 (the first is better) to 1 (the second is better)"
            )
        # One answer's win is the other's loss, so each pair adds 0 to the sum.
        balance[first] -= preference
        balance[second] += preference
        matchups[first] += 1
        matchups[second] += 1
    # Use a mean, since chunks of different sizes have different numbers of matchups.
    return [value / max(count, 1) for value, count in zip(balance, matchups, strict=True)]
