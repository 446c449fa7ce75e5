"""Agreement of a judge with labels known to be correct; measure it before using the judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinker_cookbook.eval.statistics import wilson_interval
from tinker_cookbook.exceptions import DataValidationError

# Landis & Koch 1977, Biometrics 33.
_STRENGTHS = ((0.8, "almost perfect"), (0.6, "substantial"), (0.4, "moderate"), (0.2, "fair"))


@dataclass(frozen=True)
class Agreement:
    """Agreement on two classes, with 95% intervals."""

    num_judged: int
    num_failed: int
    """Answers without a score; excluded from all other figures."""
    num_positive: int
    """Answers whose label is at least the threshold."""
    accuracy: float
    accuracy_interval: tuple[float, float]
    kappa: float
    kappa_interval: tuple[float, float]
    auc: float
    """Share of pairs of a good and a bad answer in which the good answer scores higher; NaN without
    both. Reinforcement learning needs this order only, not a threshold."""
    mean_positive: float
    """Mean score of the answers whose label is positive."""
    mean_negative: float

    def lines(self) -> list[str]:
        """Returns the figures as lines for the terminal."""
        n, failed = self.num_judged, self.num_failed
        low, high = self.accuracy_interval
        strength = next((name for least, name in _STRENGTHS if self.kappa >= least), "slight")
        lines = [
            f"judged {n} labelled answers, {self.num_positive} of them positive"
            + (f"; {failed} more have no score" if failed else ""),
            f"accuracy       {self.accuracy:.1%} (95% interval {low:.1%} to {high:.1%})",
            f"Cohen's kappa  {self.kappa:.2f} (95% interval {self.kappa_interval[0]:.2f} to "
            f"{self.kappa_interval[1]:.2f}): {strength if self.kappa > 0 else 'no'} agreement "
            "beyond chance",
            f"order (AUC)    {self.auc:.2f}; mean score {self.mean_positive:.2f} of positive, "
            f"{self.mean_negative:.2f} of negative answers",
        ]
        if self.kappa_interval[0] <= 0:
            lines.append(
                "The judge is not distinguishable from chance: training on it would teach nothing, "
                "or its biases. Use another judge, another wording, or more labels."
            )
        return lines


def measure_agreement(
    scores: Sequence[float | None], labels: Sequence[float], threshold: float = 0.5
) -> Agreement:
    """Returns the agreement of scores with labels; values >= ``threshold`` are positive.

    Scores must be on the scale of the labels, since both have the same threshold.
    ``None`` is an answer that the judge could not grade.

    Raises:
        DataValidationError: No answer has a score.
    """
    pairs = [(s, y) for s, y in zip(scores, labels, strict=True) if s is not None]
    if not pairs:
        raise DataValidationError(
            f"agreement: the judge gave no score to any of {len(labels)} answers"
        )
    n = len(pairs)
    positive = [score for score, label in pairs if label >= threshold]
    negative = [score for score, label in pairs if label < threshold]
    agreed = sum((score >= threshold) == (label >= threshold) for score, label in pairs)
    said = sum(score >= threshold for score, _ in pairs)
    kappa, interval = cohen_kappa(agreed, said, len(positive), n)
    return Agreement(
        num_judged=n,
        num_failed=len(labels) - n,
        num_positive=len(positive),
        accuracy=agreed / n,
        accuracy_interval=wilson_interval(agreed, n),
        kappa=kappa,
        kappa_interval=interval,
        auc=roc_auc(positive, negative),
        mean_positive=sum(positive) / len(positive) if positive else math.nan,
        mean_negative=sum(negative) / len(negative) if negative else math.nan,
    )


def cohen_kappa(
    agreed: int, positive_a: int, positive_b: int, total: int
) -> tuple[float, tuple[float, float]]:
    """Returns Cohen's kappa (1960) of two raters on two classes, and its 95% interval.

    With the observed agreement p and the chance agreement c, which follows from how often each
    rater chooses "positive"::

        kappa = (p - c) / (1 - c)

    The interval is the Wilson interval of p with c fixed at its estimate. Unlike the usual standard
    error (Fleiss, Cohen and Everitt 1969) it has a width if all agree. Raters that both use only
    one class agree by chance: kappa is 0 and its interval [0, 0].
    """
    a, b = positive_a / total, positive_b / total
    chance = a * b + (1 - a) * (1 - b)
    if chance >= 1:
        return 0.0, (0.0, 0.0)
    low, high = wilson_interval(agreed, total)
    kappa, low, high = ((p - chance) / (1 - chance) for p in (agreed / total, low, high))
    return kappa, (low, high)


def roc_auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Returns the share of pairs in which the positive answer has the higher score; ties count
    half.

    This is the area under the ROC curve (Mann-Whitney). NaN if one class is empty.
    """
    if not positive or not negative:
        return math.nan
    ordered = np.sort(np.asarray(negative, dtype=float))
    lower, upper = (np.searchsorted(ordered, positive, side) for side in ("left", "right"))
    return float((lower + upper).sum()) / (2 * len(positive) * len(negative))
