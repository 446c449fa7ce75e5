"""Paired comparisons, against exact enumeration and simulation (under 3 s)."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np
import pytest

from tinker_cookbook.eval.statistics import (
    bootstrap_interval,
    compare_rewards,
    examples_needed,
    mcnemar_p_value,
    sign_flip_p_value,
)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 5), (5, 1), (3, 3), (0, 9), (2, 12)])
def test_mcnemar_counts_the_outcomes_that_are_as_extreme(a, b):
    n = a + b
    outcomes = [sum(flips) for flips in product((0, 1), repeat=n)]
    extreme = sum(abs(k - n / 2) >= abs(a - n / 2) for k in outcomes)
    assert mcnemar_p_value(a, b) == pytest.approx(extreme / 2**n)


def test_mcnemar_of_a_textbook_and_of_many_examples():
    # Agresti, Categorical Data Analysis, table 10.1: 86 and 150 discordant pairs, z = 4.17.
    assert mcnemar_p_value(86, 150) == pytest.approx(3.7e-5, rel=0.1)
    assert mcnemar_p_value(40_000, 40_000) == 1.0


@pytest.mark.parametrize(("only_a", "only_b"), list(product(range(9), range(9))))
def test_the_interval_excludes_zero_exactly_where_the_test_rejects(only_a, only_b):
    a = [[1.0]] * only_a + [[0.0]] * only_b + [[1.0]] * 5
    b = [[0.0]] * only_a + [[1.0]] * only_b + [[1.0]] * 5
    found = compare_rewards(a, b)
    assert (found.only_a, found.only_b, found.method) == (only_a, only_b, "McNemar")
    assert found.low <= found.difference <= found.high
    assert (found.low > 0 or found.high < 0) == (mcnemar_p_value(only_a, only_b) < 0.05)


def test_the_exact_interval_has_the_tails_of_the_binomial_distribution():
    found = compare_rewards([[1.0]] * 3 + [[0.0]] * 17, [[0.0]] * 3 + [[1.0]] * 17)
    low, high = (found.low + 1) / 2, (found.high + 1) / 2
    tail = sum(comb(20, i) * low**i * (1 - low) ** (20 - i) for i in range(17, 21))
    assert tail == pytest.approx(0.025, rel=1e-6)
    tail = sum(comb(20, i) * high**i * (1 - high) ** (20 - i) for i in range(18))
    assert tail == pytest.approx(0.025, rel=1e-6)


def test_verdicts():
    better = compare_rewards(
        [[0.0]] * 60 + [[1.0]] * 40, [[1.0]] * 30 + [[0.0]] * 30 + [[1.0]] * 40
    )
    assert better.verdict == "better"
    assert (better.score_a, better.score_b) == (0.4, 0.7)
    assert better.p_value is not None
    assert better.p_value < 1e-8
    worse = compare_rewards([[1.0, 0.5]] * 30, [[0.5, 0.5]] * 29 + [[1.0, 0.5]])
    assert (worse.verdict, worse.method, worse.p_value) == ("worse", "bootstrap", None)
    same = compare_rewards([[1.0], [0.0], [0.0]], [[0.0], [1.0], [1.0]])
    assert same.verdict == "not distinguishable"
    assert same.examples_needed is not None
    assert same.examples_needed > 3
    equal = compare_rewards([[1.0]], [[1.0]])
    assert (equal.verdict, equal.examples_needed, equal.p_value) == ("not distinguishable", None, 1)
    # With one sign, 6 differences are the fewest with p < 0.05: 2 of 2 ** 6 patterns.
    for count, verdict in ((1, "not distinguishable"), (5, "not distinguishable"), (6, "better")):
        assert compare_rewards([[0.4]] * count, [[0.5]] * count).verdict == verdict
    assert sign_flip_p_value(np.array([0.5, 0.25, -0.25, 0.0])) == 6 / 8


def test_the_bootstrap_interval_is_that_of_the_mean_and_repeatable():
    differences = np.random.default_rng(1).normal(0.1, 1, 400)
    low, high = bootstrap_interval(differences)
    half = 1.96 * differences.std(ddof=1) / 20
    assert (low, high) == pytest.approx(
        (differences.mean() - half, differences.mean() + half), abs=0.01
    )
    assert bootstrap_interval(differences) == (low, high)


def test_the_examples_needed_find_the_difference_in_four_of_five_trials():
    # b alone is right on 20%, a alone on 10% of the examples.
    population = np.array([1.0] * 2 + [-1.0] + [0.0] * 7)
    needed = examples_needed(population)
    assert needed is not None
    generator = np.random.default_rng(2)
    found = 0
    for _ in range(400):
        drawn = generator.choice(population, needed)
        found += mcnemar_p_value(int((drawn < 0).sum()), int((drawn > 0).sum())) < 0.05
    # The exact test is slightly conservative.
    assert 0.72 < found / 400 < 0.86
