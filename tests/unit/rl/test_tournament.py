"""Who meets whom among the answers of a group, and how wins are counted."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.rl.envs.preference_envs import (
    TournamentPattern,
    get_pairs,
    get_pairs_chunked,
    mean_wins_minus_losses,
)

BOTH_WAYS, ONE_WAY = TournamentPattern


@given(st.integers(0, 9))
def test_pairs_are_all_there_once(n):
    one_way = get_pairs(n, ONE_WAY)
    assert one_way == list(combinations(range(n), 2))
    both_ways = get_pairs(n, BOTH_WAYS)
    assert sorted(both_ways) == sorted([*one_way, *((j, i) for i, j in one_way)])


@given(st.integers(0, 40), st.integers(2, 9), st.sampled_from(TournamentPattern))
def test_neighbourhoods_leave_nobody_alone(n, size, pattern):
    pairs = get_pairs_chunked(n, pattern, size)
    assert len(set(pairs)) == len(pairs) <= n * (max(size, 3) - 1)
    met = {i: {i} for i in range(n)}
    for i, j in pairs:
        met[i].add(j)
        met[j].add(i)
    assert all(len(others) <= max(size, 3) for others in met.values())
    if n > 1:
        assert all(len(others) > 1 for others in met.values())
    # They are neighbours, and each meets every other of its neighbourhood.
    assert all(met[j] == others for others in met.values() for j in others)


@given(st.integers(2, 8), st.integers(2, 8), st.sampled_from(TournamentPattern), st.data())
def test_the_balance_counts_parts_of_wins(n, size, pattern, data):
    pairs = get_pairs_chunked(n, pattern, size)
    preferences = data.draw(
        st.lists(st.floats(-1, 1), min_size=len(pairs), max_size=len(pairs)), label="preferences"
    )
    balance = mean_wins_minus_losses(n, pairs, preferences)
    for member in range(n):
        wins = losses = matchups = 0.0
        for (i, j), preference in zip(pairs, preferences, strict=True):
            if member in (i, j):
                # P(second) - P(first), with the rest of 1 shared by both as a tie is.
                second = (1 + preference) / 2
                wins += second if member == j else 1 - second
                losses += 1 - second if member == j else second
                matchups += 1
        assert balance[member] == pytest.approx((wins - losses) / matchups, abs=1e-12)
