"""Tutorials: notebooks of marimo that also run in a terminal, each about one idea.

This module has what their cells use: ``expect`` for a number that the text promises, ``mistake``
for a step that is wrong on purpose, and ``picture`` for the one plot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["CHECKS", "Check", "expect", "mistake", "picture"]


@dataclass(frozen=True)
class Check:
    """A promised result: its printed line, whether it came, and whether it is a mistake's error."""

    line: str
    holds: bool
    is_mistake: bool = False


CHECKS: list[Check] = []
"""Results of the tutorial that runs, in order."""


def expect(
    name: str, value: Any, expected: Any, *, rel: float | None = None, abs: float | None = None
) -> None:
    """Prints a result beside the expected one, and keeps whether they agree.

    Args:
        value: A number, or anything else, which must be equal.
        rel: Allowed difference as a part of ``expected``; 0.02 is 2%.
        abs: Allowed difference in the unit of the number.
    """
    if rel is None and abs is None:
        holds, within, shown = value == expected, "", value
    else:
        allowed = abs or (rel or 0.0) * max(expected, -expected)
        holds = -allowed <= value - expected <= allowed
        within = f" within {100 * (rel or 0.0):g}%" if abs is None else f" within {abs:g}"
        shown, expected = f"{value:.4g}", f"{expected:.4g}"
    verdict = "as expected" if holds else "NOT as expected"
    _keep(f"{name}: {shown}   ({verdict}: {expected}{within})", holds)


@contextmanager
def mistake(kind: type[Exception], says: str) -> Iterator[None]:
    """Runs a step that must fail with ``kind`` and a message with the words ``says``; prints it."""
    try:
        yield
    except kind as error:
        _keep(f"{type(error).__name__}: {error}", says in str(error), True)
    else:
        _keep(f"NOT as expected: there was no {kind.__name__}", False, True)


def picture(x: str, y: str, columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure of matplotlib and its axes (an array, if there are several ``columns``),
    with labels, a grid and colours that colour-blind people can tell apart."""
    import matplotlib.pyplot as plt

    with plt.style.context("seaborn-v0_8-colorblind"):
        figure, axes = plt.subplots(
            1, columns, figsize=(7 if columns == 1 else 10, 4), layout="constrained", squeeze=False
        )
    for one in axes[0]:
        one.set(xlabel=x, ylabel=y)
        one.grid(visible=True, alpha=0.3)
    return figure, axes[0, 0] if columns == 1 else axes[0]


def _keep(line: str, holds: bool, is_mistake: bool = False) -> None:
    print(line)
    CHECKS.append(Check(line, holds, is_mistake))
