"""Tables of evaluations and comparisons for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from rich import box
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tinker_cookbook.eval.run.types import BenchmarkResult, StoredTrajectory
from tinker_cookbook.eval.statistics import PairedComparison
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.notebooks import CellLine, in_notebook
from tinker_cookbook.utils.terminal import format_seconds, get_console


class EvalProgress:
    """Progress bar for each task, with the time left and the score so far.

    Without a terminal, prints a line after every tenth of a task; in a notebook the line changes.
    """

    def __init__(self) -> None:
        self._console = get_console()
        self._lines = not self._console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=self._lines,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        activity().shown += not self._lines
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()
        activity().shown -= not self._lines

    def start(self, name: str, total: int, done: int) -> None:
        """Starts a task."""
        self._name, self._total, self._done = name, total, done
        self._rewards: list[float] = []
        self._errors = 0
        self._cell = CellLine()
        activity().details["evaluating"] = f"{name} {done}/{total}"
        if done:
            self._console.print(f"{name}: {done} of {total} problems were answered before")
        # Stored problems do not count in the bar, or the estimated time would be far too short.
        self._task = self._bars.add_task(name, total=total - done, status="")

    def update(self, rows: Sequence[StoredTrajectory], stored: bool) -> None:
        """Shows that a problem is done; the score includes stored answers, the bar does not."""
        self._rewards += [row.reward for row in rows if row.error is None]
        self._errors += sum(row.error is not None for row in rows)
        if stored:
            return
        self._done += 1
        activity().details["evaluating"] = f"{self._name} {self._done}/{self._total}"
        status = f"score {sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else ""
        if self._errors:
            status += f"  {self._errors} errors"
        self._bars.update(self._task, advance=1, status=status)
        line = f"{self._name}: {self._done}/{self._total}  {status}"
        tenth = max(1, self._total // 10)
        if in_notebook():
            self._cell.show(line)
        elif self._lines and (self._done % tenth == 0 or self._done == self._total):
            self._console.print(line, markup=False)


def result_table(results: Mapping[str, BenchmarkResult]) -> Table:
    """Returns a row for each task: n, score, 95% interval, errors, truncated answers, seconds."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("task")
    for name in ("n", "score", "95% interval", "errors", "truncated"):
        table.add_column(name, justify="right")
    table.add_column("time", justify="right")
    for name, result in results.items():
        metrics, n = result.metrics, str(result.num_examples)
        problems = metrics.get("num_problems")
        if problems:
            n = f"{problems:.0f} x {result.num_examples / problems:.3g}"
        interval = "-"
        if "ci_low" in metrics:
            interval = f"{metrics['ci_low']:.1%} to {metrics['ci_high']:.1%}"
        counts = (str(result.num_errors), str(result.num_truncated))
        seconds = format_seconds(result.time_seconds)
        # If all answers failed there is no score, and 0% would be misread as one.
        graded = result.num_examples > result.num_errors
        score = f"{result.score:.1%}" if graded else "-"
        table.add_row(name, n, score, interval, *counts, seconds)
    return table


def curve_table(results: Mapping[str, BenchmarkResult]) -> Table | None:
    """Returns pass@k and maj@k of tasks with several samples; ``None`` if there are none."""
    curves = {
        (name, measure): values
        for name, result in results.items()
        for measure, values in (
            ("pass@k", result.pass_at_k),
            (
                "maj@k",
                {int(m[4:]): float(x) for m, x in result.metrics.items() if m.startswith("maj@")},
            ),
        )
        if values
    }
    # Powers of 2 and the last k are enough to show the curve.
    every = {k for values in curves.values() for k in values if k & (k - 1) == 0}
    every |= {max(values) for values in curves.values()}
    if not every:
        return None
    table = Table("task", "", *(f"k = {k}" for k in sorted(every)), box=box.SIMPLE_HEAD)
    for (name, measure), values in curves.items():
        cells = (f"{values[k]:.1%}" if k in values else "" for k in sorted(every))
        table.add_row(name, measure, *cells)
    return table


def comparison_lines(name: str, found: PairedComparison) -> list[str]:
    """Returns the verdict in sentences."""
    verdict = {
        "better": "b is better than a",
        "worse": "b is worse than a",
        "not distinguishable": "a and b are not distinguishable",
    }[found.verdict]
    test = "paired bootstrap"
    if found.p_value is not None:
        test = f"exact McNemar test, p = {found.p_value:.2g}"
    lines = [
        f"{name}: {verdict} on {found.num_examples} examples ({test})",
        f"  a {found.score_a:.1%}, b {found.score_b:.1%}: difference {found.difference:+.1%} "
        f"(95% interval {found.low:+.1%} to {found.high:+.1%})",
        f"  a has the higher reward on {found.only_a} examples, b on {found.only_b}",
    ]
    if found.verdict == "not distinguishable" and (found.low > 0 or found.high < 0):
        # The bootstrap varies too little with few differences, so an exact test decides too.
        differ = found.only_a + found.only_b
        least = "; it needs at least 6" if differ < 6 else ""
        lines.append(
            "  the interval excludes 0, but the exact sign-flip test finds no difference: "
            f"{differ} examples differ{least}"
        )
    if found.verdict == "not distinguishable" and found.examples_needed is not None:
        lines.append(
            f"  if the true difference is as large as this one, about {found.examples_needed:,} "
            "examples would show it (power 80%)"
        )
    return lines
