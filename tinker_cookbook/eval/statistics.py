"""Statistics of evaluations: intervals of scores, pass@k, maj@k and solve rates.

A score from few examples is uncertain, so it is reported with a 95% confidence
interval. ``comparison`` has the tests of the difference between two evaluations.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import numpy as np

from tinker_cookbook.exceptions import DataValidationError

Z95 = 1.959963984540054
"""97.5% quantile of the normal distribution."""

_MOST_SUBSETS = 2000


def wilson_interval(successes: float, total: float, z: float = Z95) -> tuple[float, float]:
    """Returns the 95% Wilson confidence interval of a share (``z`` standard deviations).

    With ``p = successes / total``::

        (p + z^2 / 2n  ±  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    It stays within 0 and 1 and is accurate for small n and shares near 0 or 1 (Wilson 1927; Brown,
    Cai and DasGupta 2001). It assumes independent trials. Fractional ``successes``, sums of
    scores from 0 to 1, give an interval that is slightly too wide.

    Raises:
        DataValidationError: ``total`` is not positive, or ``successes`` is not in 0 to ``total``.
    """
    if total <= 0 or not 0 <= successes <= total:
        raise DataValidationError(
            f"share: got {successes} of {total}, expected 0 to n of n, with n at least 1"
        )
    share, spread = successes / total, z * z / total
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    # For no and for all successes, one end is exact; rounding would move it slightly.
    return 0.0 if share == 0 else max(0.0, low), 1.0 if share == 1 else min(1.0, high)


def describe_share(successes: int, total: int) -> str:
    """Returns ``45 of 60 = 75.0% (95% interval 62.8% to 84.2%)``; ``0 of 0`` has no interval."""
    if total == 0:
        return "0 of 0"
    low, high = wilson_interval(successes, total)
    share = f"{successes} of {total} = {successes / total:.1%}"
    return f"{share} (95% interval {low:.1%} to {high:.1%})"


def cluster_standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Returns the standard error of the mean over all values with correlated values in a group.

    ``groups`` are the rewards of the answers to each problem. With N values, G groups and the mean
    m::

        sqrt(G / (G - 1) * sum_g (sum_i (x_gi - m))^2) / N

    which is the cluster-robust error of Liang and Zeger (1986), and the usual one if each group has
    one value. Infinite for a single group.
    """
    groups = [group for group in groups if group]
    if len(groups) < 2:
        return math.inf
    sizes = np.array([len(group) for group in groups], dtype=float)
    sums = np.array([sum(group) for group in groups], dtype=float)
    residuals = sums - sizes * (sums.sum() / sizes.sum())
    spread = len(groups) / (len(groups) - 1) * float(residuals @ residuals)
    return math.sqrt(spread) / float(sizes.sum())


def score_interval(groups: Sequence[Sequence[float]], z: float = Z95) -> tuple[float, float]:
    """Returns the 95% interval of the mean reward; ``groups`` are the rewards of each problem.

    With one answer per problem: the Wilson interval. With several: the Wilson interval for the
    effective number of answers ``p (1 - p) / SE^2``, with the cluster-robust standard error (Dean
    and Pagano 2015). That is between the number of problems, if all answers to a problem are equal,
    and the number of answers, if they are independent. Rewards outside 0 to 1 get ``m ± z SE``.

    Raises:
        DataValidationError: there is no reward.
    """
    groups = [group for group in groups if group]
    values = [value for group in groups for value in group]
    if not values:
        raise DataValidationError("score: got no reward, expected at least one")
    mean, error = sum(values) / len(values), cluster_standard_error(groups)
    if min(values) < 0 or max(values) > 1:
        return mean - z * error, mean + z * error
    effective = float(len(values))
    if len(groups) < len(values):
        # If all groups are right or all wrong, the estimated spread of 0 is too small.
        count = mean * (1 - mean) / error**2 if 0 < error < math.inf else len(groups)
        effective = min(effective, max(float(len(groups)), count))
    return wilson_interval(min(mean, 1.0) * effective, effective, z)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that at least one of ``k`` answers is right.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021), the share of subsets of size k among the n
    answers that have a right answer.

    Raises:
        DataValidationError: not 0 <= ``num_correct`` <= ``num_samples``, or k not in 1 to n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise DataValidationError(
            f"pass@k: got k={k} with {num_correct} of {num_samples} right, expected 1 to n for k"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(correct: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Returns pass@k over problems, for each k up to the fewest answers of a problem.

    ``correct`` has, for each problem, whether each answer is right.
    """
    counts = [(len(answers), sum(answers)) for answers in correct if answers]
    fewest = min((n for n, _ in counts), default=0)
    return {
        k: sum(pass_at_k(n, c, k) for n, c in counts) / len(counts) for k in range(1, fewest + 1)
    }


def majority_reward(answers: Sequence[Hashable], rewards: Sequence[float]) -> float:
    """Returns the reward of the most frequent answer; ties are averaged.

    Equal answers have one reward. ``None`` is an unreadable answer: it has no vote, and
    if all are ``None`` the reward is 0.
    """
    votes: Mapping[Hashable, list[float]] = defaultdict(list)
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            votes[answer].append(reward)
    most = max((len(group) for group in votes.values()), default=0)
    leaders = [sum(group) / len(group) for group in votes.values() if len(group) == most]
    return sum(leaders) / len(leaders) if leaders else 0.0


def majority_at_k(answers: Sequence[Hashable], rewards: Sequence[float], k: int) -> float:
    """Returns the mean of ``majority_reward`` over the subsets of ``k`` answers.

    Uses all subsets, or 2000 random ones (the same at each call) if there are more.
    """
    positions: Sequence[int] = range(len(answers))
    if math.comb(len(answers), k) <= _MOST_SUBSETS:
        subsets = list(combinations(positions, k))
    else:
        generator = random.Random(0)
        subsets = [tuple(generator.sample(positions, k)) for _ in range(_MOST_SUBSETS)]
    values = [
        majority_reward([answers[i] for i in subset], [rewards[i] for i in subset])
        for subset in subsets
    ]
    return sum(values) / len(values)


def solve_rate_histogram(correct: Sequence[Sequence[bool]], bins: int = 10) -> list[int]:
    """Returns the numbers of problems by their share of right answers.

    The first count is problems never solved, the last count problems always solved; between them
    are ``bins`` equal ranges of shares above 0 and below 1.
    """
    counts = [0] * (bins + 2)
    for answers in correct:
        if not answers:
            continue
        share = sum(answers) / len(answers)
        # Never and always solved are separate: neither has a signal for reinforcement learning.
        inside = 1 + min(bins - 1, int(share * bins))
        counts[0 if share == 0 else bins + 1 if share == 1 else inside] += 1
    return counts


def mixed_share(correct: Sequence[Sequence[bool]]) -> float:
    """Returns the share of problems with both right and wrong answers; 0 without problems.

    Only these have a gradient in group-based reinforcement learning (GRPO).
    """
    rates = [sum(answers) / len(answers) for answers in correct if answers]
    return sum(0 < rate < 1 for rate in rates) / len(rates) if rates else 0.0
