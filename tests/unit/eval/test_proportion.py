"""Intervals of shares, against scipy's and against values from the literature."""

from __future__ import annotations

import pytest

from tinker_cookbook.eval.proportion import describe_share, wilson_interval
from tinker_cookbook.exceptions import DataValidationError


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


@pytest.mark.parametrize(("successes", "total"), [(3, 2), (-1, 4), (0, 0)])
def test_counts_that_cannot_be(successes, total):
    with pytest.raises(DataValidationError, match="expected 0 to n of n"):
        wilson_interval(successes, total)
