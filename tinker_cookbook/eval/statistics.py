"""Statistics of evaluations: intervals, pass@k, maj@k, and tests of a difference.

A score from few examples is uncertain, so it is reported with a 95% confidence interval. Two models
that answer the same examples are compared by the difference per example. Its spread is smaller than
for two independent scores: overlapping intervals of two scores do not mean that the models are
equally good.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

Z95 = 1.959963984540054
"""97.5% quantile of the normal distribution."""

Z80 = 0.8416212335729143
"""80% quantile of the normal distribution: the power of ``examples_needed``."""

_MOST_SUBSETS = 2000
_RESAMPLES = 10_000
_MOST_FLIPPED = 16
_BATCH = 2_000_000  # values of one batch of resamples, to bound memory

Verdict = Literal["better", "worse", "not distinguishable"]


def wilson_interval(successes: float, total: float, z: float = Z95) -> tuple[float, float]:
    """Returns the 95% Wilson confidence interval of a share (``z`` standard deviations).

    With ``p = successes / total``::

        (p + z^2 / 2n  ±  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    It stays within 0 and 1 and is accurate for small n and shares near 0 or 1 (Wilson 1927; Brown,
    Cai and DasGupta 2001). It assumes independent trials. Fractional ``successes``, sums of
    scores from 0 to 1, give an interval that is slightly too wide.
    """
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
    """
    groups = [group for group in groups if group]
    values = [value for group in groups for value in group]
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
    """
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


# --- the difference of two evaluations ----------------------------------------------------------


@dataclass(frozen=True)
class PairedComparison:
    """Difference b - a between two evaluations of the same examples."""

    num_examples: int
    score_a: float
    score_b: float
    difference: float
    low: float
    """95% interval of the difference."""
    high: float
    p_value: float | None
    """Two-sided, of the exact McNemar test; ``None`` for the bootstrap."""
    only_a: int
    """Examples on which a has the higher reward."""
    only_b: int
    method: Literal["McNemar", "bootstrap"]
    verdict: Verdict
    examples_needed: int | None
    """Number of examples at which a difference of this size is found with 80% probability;
    ``None`` if there is no difference."""


def compare_rewards(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], seed: int = 0
) -> PairedComparison:
    """Compares the rewards of two models; entry i of both is one example with its answers.

    With one answer each, right or wrong: the exact McNemar test. Otherwise a bootstrap over
    examples of the difference of their mean rewards; with up to 16 differences the exact
    sign-flip test must find a difference too.
    """
    means_a, means_b = (np.array([sum(x) / len(x) for x in side], dtype=float) for side in (a, b))
    differences = means_b - means_a
    mean = float(differences.mean())
    only_a, only_b = int((differences < 0).sum()), int((differences > 0).sum())
    single = all(len(x) == len(y) == 1 for x, y in zip(a, b, strict=True))
    binary = single and set(np.unique(np.concatenate([means_a, means_b]))) <= {0.0, 1.0}
    p_value: float | None = None
    if binary:
        p_value = mcnemar_p_value(only_a, only_b)
        low, high = _discordant_interval(only_a, only_b, len(a))
        found = p_value < 0.05
    else:
        low, high = bootstrap_interval(differences, seed)
        # Resamples of a few examples vary too little: of one example, not at all.
        found = (low > 0 or high < 0) and sign_flip_p_value(differences) < 0.05
    return PairedComparison(
        num_examples=len(a),
        score_a=float(means_a.mean()),
        score_b=float(means_b.mean()),
        difference=mean,
        low=low,
        high=high,
        p_value=p_value,
        only_a=only_a,
        only_b=only_b,
        method="McNemar" if binary else "bootstrap",
        verdict=("better" if mean > 0 else "worse") if found else "not distinguishable",
        examples_needed=examples_needed(differences),
    )


def mcnemar_p_value(only_a: int, only_b: int) -> float:
    """Returns the two-sided p-value of the exact McNemar test.

    If both models are equally good, each example that only one of them answers correctly is a fair
    coin: ``min(1, 2 P(X <= min(only_a, only_b)))`` with X binomial(only_a + only_b, 1/2).
    """
    total, fewer = only_a + only_b, min(only_a, only_b)
    if total == 0:
        return 1.0
    logs = _log_binomials(total)[: fewer + 1] - total * math.log(2)
    return min(1.0, 2 * float(np.exp(logs).sum()))


def _log_binomials(total: int) -> np.ndarray:
    """Returns log C(total, i) for i from 0 to ``total``; C itself overflows."""
    counts = np.arange(total)
    return np.concatenate([[0.0], np.cumsum(np.log(total - counts) - np.log1p(counts))])


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Returns the two-sided p-value of the exact sign-flip test of ``differences`` [N].

    If both models are equally good, each difference could as well have the other sign. Returns 0
    for more than 16 differences, where the bootstrap is reliable.
    """
    nonzero = differences[differences != 0]
    if len(nonzero) > _MOST_FLIPPED:
        return 0.0
    signs = 1 - 2 * (np.arange(2 ** len(nonzero))[:, None] >> np.arange(len(nonzero)) & 1)
    sums = np.abs(signs @ nonzero)
    # Sums in another order may differ in the last bits.
    return float((sums >= sums[0] * (1 - 1e-9)).mean())


def bootstrap_interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Returns the 95% percentile interval of the mean of ``differences`` [N], by 10,000 resamples.

    The same seed gives the same interval.
    """
    generator = np.random.default_rng(seed)
    size = len(differences)
    rows = max(1, min(_RESAMPLES, _BATCH // size))
    means = [
        differences[generator.integers(0, size, (min(rows, _RESAMPLES - start), size))].mean(1)
        for start in range(0, _RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def examples_needed(differences: np.ndarray) -> int | None:
    """Returns the number of examples that detects the mean difference with 80% power at the 5%
    level.

    ``((z_0.975 s0 + z_0.8 s) / d)^2`` with the mean d, the standard deviation s, and
    ``s0 = sqrt(s^2 + d^2)``, the standard deviation if the true mean is 0; for right or wrong
    answers this is the formula of Connor (1987) for the McNemar test. At least 6, as the exact
    tests never find fewer differences. ``None`` if d is 0.
    """
    mean = float(differences.mean())
    if mean == 0:
        return None
    square = float((differences**2).mean())
    deviation = math.sqrt(max(0.0, square - mean**2))
    return max(6, math.ceil(((Z95 * math.sqrt(square) + Z80 * deviation) / mean) ** 2))


def _discordant_interval(only_a: int, only_b: int, total: int) -> tuple[float, float]:
    """Returns the exact interval of the difference, given the number of discordant examples.

    It excludes 0 exactly where the test rejects: it is the interval of Clopper and Pearson (1934)
    for the share of b among the discordant examples, in units of all examples.
    """
    discordant = only_a + only_b
    if discordant == 0:
        return 0.0, 0.0
    low = 0.0 if only_b == 0 else _solve(discordant, only_b, 0.025, upper_tail=True)
    high = 1.0 if only_a == 0 else _solve(discordant, only_b, 0.025, upper_tail=False)
    return (2 * low - 1) * discordant / total, (2 * high - 1) * discordant / total


def _solve(trials: int, successes: int, level: float, upper_tail: bool) -> float:
    """Returns the share at which P(X >= successes), or P(X <= successes), is ``level``."""
    low, high = 0.0, 1.0
    counts = np.arange(successes, trials + 1) if upper_tail else np.arange(successes + 1)
    logs = _log_binomials(trials)[counts]
    for _ in range(60):
        share = (low + high) / 2
        terms = logs + counts * math.log(share) + (trials - counts) * math.log1p(-share)
        tail = float(np.exp(terms).sum())
        # The upper tail grows with the share, the lower tail falls.
        if (tail < level) == upper_tail:
            low = share
        else:
            high = share
    return (low + high) / 2
