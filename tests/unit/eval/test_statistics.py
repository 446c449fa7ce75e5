"""Statistics of scores, against the literature, exact enumeration and simulation (under 2 s)."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from tinker_cookbook.eval.statistics import (
    cluster_standard_error,
    describe_share,
    majority_at_k,
    majority_reward,
    mean_pass_at_k,
    pass_at_k,
    score_interval,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857, table I, Wilson's method.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_published_intervals(successes, total, low, high):
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=5e-5)


def test_all_right_is_the_mirror_of_all_wrong():
    low, high = wilson_interval(20, 20)
    assert (1 - high, 1 - low) == pytest.approx(wilson_interval(0, 20))


def test_in_words():
    assert describe_share(45, 60) == "45 of 60 = 75.0% (95% interval 62.8% to 84.2%)"
    assert describe_share(0, 0) == "0 of 0"


def test_one_answer_to_a_problem_gives_the_usual_standard_error_and_wilsons_interval():
    values = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    groups = [[value] for value in values]
    assert cluster_standard_error(groups) == pytest.approx(np.std(values, ddof=1) / 7**0.5)
    assert score_interval(groups) == wilson_interval(4, 7)


def test_repeated_answers_add_no_information():
    # Four equal answers to each of 30 problems are 30 independent trials, not 120.
    groups = [[float(i < 12)] * 4 for i in range(30)]
    low, high = score_interval(groups)
    assert (low, high) == pytest.approx(wilson_interval(12, 30), abs=0.01)
    assert high - low > 1.8 * np.subtract(*wilson_interval(48, 120)[::-1])


@pytest.mark.parametrize("strength", [0.4, 2.0])
def test_the_clustered_interval_covers_the_truth_where_the_naive_one_does_not(strength):
    # 40 problems with 8 answers; rates of the problems vary (a beta distribution, mean 0.3).
    generator = np.random.default_rng(5)
    covered = naive = 0
    for _ in range(400):
        rates = generator.beta(0.3 * strength, 0.7 * strength, 40)
        answers = (generator.random((40, 8)) < rates[:, None]).astype(float)
        low, high = score_interval(answers.tolist())
        covered += low <= 0.3 <= high
        low, high = wilson_interval(answers.sum(), 320)
        naive += low <= 0.3 <= high
    assert covered / 400 >= 0.92
    assert naive / 400 < 0.85


def test_rewards_beyond_0_and_1_have_a_symmetric_interval():
    low, high = score_interval([[-1.0], [2.0], [5.0]])
    assert (low + high) / 2 == pytest.approx(2)


@pytest.mark.parametrize(("n", "c"), list(product(range(1, 8), range(8))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, c):
    if c > n:
        return
    right = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(combinations(right, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_several_problems():
    assert mean_pass_at_k([[True, False], [False, False], [True, True, True]]) == {
        1: pytest.approx(1.5 / 3),
        2: pytest.approx(2 / 3),
    }
    assert mean_pass_at_k([]) == {}


def test_majority_votes():
    assert majority_reward(["4", "4", "5"], [1, 1, 0]) == 1
    assert majority_reward(["4", "5"], [1, 0]) == 0.5
    # Answers that could not be read do not form a majority together.
    assert majority_reward([None, None, "4"], [0, 0, 1]) == 1
    assert majority_reward([None], [0]) == 0
    # Subsets of 4, 4, 5 with two answers: {4, 4} is right, {4, 5} twice a tie.
    assert majority_at_k(["4", "4", "5"], [1, 1, 0], 2) == pytest.approx(2 / 3)
    assert majority_at_k(["4"] * 20 + ["5"] * 12, [1.0] * 20 + [0.0] * 12, 9) > 0.7
