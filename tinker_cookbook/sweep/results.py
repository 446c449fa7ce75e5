"""The results of a sweep: a table of the runs, ``results.jsonl`` and a picture."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tinker_cookbook.exceptions import ConfigurationError, install_command, nearest_sentence
from tinker_cookbook.run.best import METRICS, lower_is_better
from tinker_cookbook.sweep.runs import State, SweepRun
from tinker_cookbook.utils.terminal import format_seconds

_STYLES: dict[State, str] = {
    "failed": "bold red",
    "running": "cyan",
    "resumed": "cyan",
    "waiting": "dim",
    "done": "green",
}
"""Style of each state, in the order in which a person needs to see them."""


def runs_table(runs: Sequence[SweepRun], metrics: Sequence[str], best: str = "") -> Table:
    """Returns a table of the runs, the one of the name ``best`` in bold.

    Of ``metrics`` the first that a run has is shown. Failed and running runs come first: a terminal
    that is too low shows the top of the table.
    """
    states, order = [run.state for run in runs], list(_STYLES)
    counts = [f"{states.count(state)} {state}" for state in order if state in states]
    table = Table(title=", ".join(counts), title_justify="left")
    table.add_column("run", overflow="fold")
    for name in ("state", "step", "metric", "time"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    for run in sorted(runs, key=lambda run: order.index(run.state)):
        cells = [Text(run.point.name), Text(run.state, style=_STYLES[run.state])]
        style = "bold" if run.point.name == best else ""
        table.add_row(*cells, *map(Text, _progress(run, metrics)), style=style)
    return table


def progress_line(run: SweepRun, metrics: Sequence[str]) -> str:
    """Returns what ``runs_table`` shows of a run, for outputs that are no terminal."""
    return "  ".join(filter(None, (f"{run.state:8}", run.point.name, *_progress(run, metrics))))


def _progress(run: SweepRun, metrics: Sequence[str]) -> tuple[str, str, str]:
    """Returns the step, the first of ``metrics`` that the run has, and the time, as text."""
    total = f"/{run.total}" if run.step and run.total is not None else ""
    step = "" if run.step is None else f"{run.step}{total}"
    name = next((name for name in metrics if name in run.metrics), None)
    metric = "" if name is None else f"{name} {run.metrics[name]:.5g}"
    return step, metric, format_seconds(run.elapsed) if run.elapsed else ""


def collect(runs: Sequence[SweepRun], metric: str | None) -> list[dict[str, Any]]:
    """Returns one row for each run: swept values, ``metric``, ``value``, ``step``, ``seconds``,
    ``state`` and ``log_path``.

    Raises:
        ConfigurationError: All runs have finished, but none has logged the metric.
    """
    for run in runs:
        run.read_metrics()
    known = {name for run in runs for name in run.metrics}
    metric = metric or next((name for name in METRICS if name in known), "")
    if metric not in known and all(run.state == "done" for run in runs):
        raise ConfigurationError(
            f"metric: got {metric or 'none'}, which no run logs{nearest_sentence(metric, known)} "
            f"Expected one of: {', '.join(sorted(known)) or 'none'}. The runs are done: the same "
            "command with metric=NAME prints the table"
        )
    return [
        {
            "run": run.point.name,
            "metric": metric or None,
            "value": run.metrics.get(metric),
            "step": run.step,
            "seconds": round(run.elapsed, 1),
            "state": run.state,
            "log_path": str(run.log_path),
            **{key: typed(text) for key, text in run.point.swept.items()},
        }
        for run in runs
    ]


def typed(text: str) -> float | int | bool | str | None:
    """Returns a setting as a number, a truth value, ``None``, or text."""
    try:
        # Numbers are written as numbers: the plot finds its axis by their type.
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float, bool, type(None))) else text


def metric_note(metric: str) -> str | None:
    """Returns a caution about comparing runs by a training metric; ``None`` if it is held out."""
    if metric.startswith("test/"):
        return None
    return (
        f"note: {metric} is measured on training batches, so it varies with the batch and "
        "overfitting improves it. Recipes with held-out data, such as recipes.sl_basic, "
        "are compared by test/nll."
    )


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the finished run with the best value, or ``None``."""
    done = [
        row
        for row in rows
        if row["state"] == "done" and row["value"] is not None and math.isfinite(row["value"])
    ]
    sign = 1 if done and lower_is_better(done[0]["metric"]) else -1
    return min(done, key=lambda row: sign * row["value"], default=None)


def plot(rows: Sequence[dict[str, Any]], swept: Sequence[str], path: Path) -> str:
    """Plots the metric against the first numeric setting, a line for each combination of the
    others.

    Returns:
        The path, or why there is no picture.
    """
    done = [row for row in rows if row["state"] == "done" and row["value"] is not None]
    # type(), not isinstance: a truth value is an int too, and no axis.
    x = next((key for key in swept if all(type(row[key]) in (int, float) for row in rows)), None)
    if x is None or not done:
        return "no picture: no swept key is numeric, or no run has the metric"
    try:
        import matplotlib
        import pandas
    except ImportError:
        return f"no picture: it needs matplotlib: {install_command('plot')}"
    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    # One column for each combination of the other settings, one row for each x.
    others = [key for key in swept if key != x]
    for row in done:
        row["label"] = ", ".join(f"{key}={row[key]}" for key in others)
    curves = pandas.DataFrame(done).pivot(index=x, columns="label", values="value")
    # In the order of the sweep, since as texts 16 would come before 4.
    curves = curves[list(dict.fromkeys(row["label"] for row in done))]
    curves.columns.name = None  # the labels have the names of the settings
    xs = [row[x] for row in done]
    # Values over more than a decade are chosen in factors.
    logx = min(xs) > 0 and max(xs) / min(xs) > 10
    axes = curves.plot(
        marker="o", logx=logx, grid=True, legend=bool(others), ylabel=done[0]["metric"]
    )
    axes.figure.savefig(path, dpi=120)
    pyplot.close(axes.figure)
    return str(path)
