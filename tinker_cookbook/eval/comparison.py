"""Paired tests of whether one evaluation is better than another on the same examples.

Both models answer the same examples, so the test uses the difference per example. Its spread is
smaller than for two independent scores: overlapping intervals of two scores do not mean that
the models are equally good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tinker_cookbook.eval.statistics import Z95
from tinker_cookbook.exceptions import DataValidationError

Z80 = 0.8416212335729143
"""80% quantile of the normal distribution: the power of ``examples_needed``."""

_RESAMPLES = 10_000
_MOST_FLIPPED = 16
_BATCH = 2_000_000  # values of one batch of resamples, to bound memory

Verdict = Literal["better", "worse", "not distinguishable"]


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

    Raises:
        DataValidationError: the lengths differ, or there are no examples.
    """
    if len(a) != len(b) or not a:
        raise DataValidationError(
            f"compare: got {len(a)} and {len(b)} examples, expected the same ones, at least one"
        )
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
    counts = np.arange(fewer)
    # log C(n, i) by the ratio of neighbours; in logarithms, since C(n, i) overflows.
    logs = np.concatenate([[0.0], np.cumsum(np.log(total - counts) - np.log1p(counts))])
    return min(1.0, 2 * float(np.exp(logs - total * math.log(2)).sum()))


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
    answers this is the formula of Connor (1987) for the McNemar test. ``None`` if d is 0.
    """
    mean = float(differences.mean())
    if mean == 0:
        return None
    square = float((differences**2).mean())
    deviation = math.sqrt(max(0.0, square - mean**2))
    return math.ceil(((Z95 * math.sqrt(square) + Z80 * deviation) / mean) ** 2)


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
    every = np.arange(trials)
    logs = np.concatenate([[0.0], np.cumsum(np.log(trials - every) - np.log1p(every))])[counts]
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
