"""Prints metrics to the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from tinker_cookbook.utils.ml_log.base import Logger, Metrics
from tinker_cookbook.utils.terminal import get_console


class PrettyPrintLogger(Logger):
    """Prints a table for each step on a terminal, and one line for each step into a file.

    Args:
        console: Where to print; by default the shared one on standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or get_console()

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Prints the metrics, sorted by group and name."""
        if not metrics:
            return
        # Metrics without a group come first.
        ordered = sorted(metrics.items(), key=lambda item: ("/" in item[0], item[0]))
        if self._console.is_terminal:
            table = Table(title=None if step is None else f"step {step}", title_justify="left")
            table.add_column("metric", no_wrap=True)
            table.add_column("value", justify="right", overflow="fold")
            for name, value in ordered:
                table.add_row(name, format_value(value))
            self._console.print(table)
        else:
            head = "" if step is None else f"step {step}  "
            line = head + "  ".join(f"{name}={format_value(value)}" for name, value in ordered)
            # soft_wrap keeps a step on one line, whatever the width of the console is.
            self._console.print(line, markup=False, soft_wrap=True)


def format_value(value: object) -> str:
    """Formats a number: four significant digits, or thousands separators for whole numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        item = getattr(value, "item", None)  # numpy and torch scalars
        return format_value(item()) if callable(item) else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-4 <= abs(value) < 1e6:
        # As many decimals as give four significant digits.
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}"
    return f"{value:.3e}"
