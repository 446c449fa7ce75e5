#!/bin/bash
set -e
cat > /app/stats.py <<'END'
"""Statistics of lists."""


def median(values):
    if not values:
        raise ValueError("the median of no values")
    ordered, middle = sorted(values), len(values) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def mean(values):
    return sum(values) / len(values)
END
