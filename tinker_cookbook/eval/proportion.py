"""Confidence intervals of shares: k of n right is uncertain where n is small."""

from __future__ import annotations

import math

from tinker_cookbook.exceptions import DataValidationError


def wilson_interval(
    successes: float, total: int, z: float = 1.959963984540054
) -> tuple[float, float]:
    """Returns the interval that contains the true share with 95% (``z`` standard deviations).

    With ``p = successes / total``::

        (p + z^2 / 2n  ±  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    It stays within 0 and 1 and is right for small n and shares near the ends (Wilson 1927; Brown,
    Cai and DasGupta 2001). It takes the trials as independent. Fractional ``successes``, sums of
    scores from 0 to 1, give an interval that is slightly too wide.

    Raises:
        DataValidationError: ``total`` is not positive or ``successes`` not in 0 to ``total``.
    """
    if total < 1 or not 0 <= successes <= total:
        raise DataValidationError(
            f"share: got {successes} of {total}, expected 0 to n of n, with n at least 1"
        )
    share, spread = successes / total, z * z / total
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    # Rounding may put the ends slightly outside 0 and 1.
    return max(0.0, low), min(1.0, high)


def describe_share(successes: int, total: int) -> str:
    """Returns ``45 of 60 = 75.0% (95% interval 62.8% to 84.2%)``; ``0 of 0`` has no interval."""
    if total == 0:
        return "0 of 0"
    low, high = wilson_interval(successes, total)
    share = f"{successes} of {total} = {successes / total:.1%}"
    return f"{share} (95% interval {low:.1%} to {high:.1%})"
