"""The end of a sweep: what each run came to, as a table, as ``results.jsonl`` and as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.sweep.grid import Value, is_number, typed
from tinker_cookbook.sweep.jobs import Job
from tinker_cookbook.sweep.records import METRICS as METRICS_FILE
from tinker_cookbook.sweep.watch import METRICS, lower_is_better
from tinker_cookbook.utils.run_folder.jsonl import Row, encode_row, read_rows
from tinker_cookbook.utils.run_folder.paths import write_atomically
from tinker_cookbook.utils.terminal import format_seconds

RESULTS = "results.jsonl"
PICTURE = "sweep.png"
_LOG_AXIS_FROM = 10.0


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        name: Of the run.
        swept: The values that set it apart.
        state: ``done`` or ``failed``.
        metric: Name of what is compared.
        value: Its last value, or ``None`` where the run has none.
        step: Of the last row.
        seconds: Of all attempts.
        log_path: Folder of the run.
    """

    name: str
    swept: dict[str, Value]
    state: str
    metric: str | None
    value: float | None
    step: int | None
    seconds: float
    log_path: str

    def row(self) -> dict[str, Any]:
        """One line of ``results.jsonl``: the swept settings stand beside the rest."""
        rest = {
            "metric": self.metric,
            "value": self.value,
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "state": self.state,
            "log_path": self.log_path,
        }
        return {"run": self.name, **rest, **self.swept}


def collect(jobs: Sequence[Job], metric: str | None) -> list[Result]:
    """Reads what the runs logged.

    Args:
        jobs: The runs.
        metric: What to compare; ``None`` takes the first of the usual ones that any run logs.
    """
    rows = {job.run.name: read_rows(job.log_path / METRICS_FILE) for job in jobs}
    if metric is None:
        everything = [row for some in rows.values() for row in some]
        metric = next((name for name in METRICS if _last(everything, name) is not None), None)
    return [
        Result(
            name=job.run.name,
            swept={key: typed(text) for key, text in job.run.swept.items()},
            state=job.state,
            metric=metric,
            value=None if metric is None else _last(rows[job.run.name], metric),
            step=_last_step(rows[job.run.name]),
            seconds=job.seconds,
            log_path=os.fspath(job.log_path),
        )
        for job in jobs
    ]


def write_results(results: Sequence[Result], path: Path) -> None:
    """One object a run."""
    write_atomically(path, b"".join(encode_row(result.row()) for result in results))


def check_metric(results: Sequence[Result]) -> None:
    """Raises ``ConfigurationError`` where no finished run has what is to be compared."""
    finished = [result for result in results if result.state == "done"]
    if not finished or any(result.value is not None for result in finished):
        return
    rows = read_rows(Path(finished[0].log_path) / METRICS_FILE)
    known = sorted({key for row in rows for key in row})
    got = finished[0].metric
    raise ConfigurationError(
        f"metric: got {got or 'none'}, which no run logs{nearest_sentence(got or '', known)} "
        f"Expected one of: {', '.join(known) or 'nothing was logged'}. The runs are done: the same "
        "command with metric=NAME reads them at once"
    )


def best_of(results: Sequence[Result]) -> Result | None:
    """Returns the finished run with the best value, or ``None``."""
    finished = [result for result in results if result.state == "done" and result.value is not None]
    if not finished:
        return None
    sign = 1 if lower_is_better(str(finished[0].metric)) else -1
    return min(finished, key=lambda result: sign * (result.value or 0.0))


def results_table(results: Sequence[Result]) -> Table:
    """The runs with their swept values, the best in bold."""
    best = best_of(results)
    keys = list(results[0].swept) if results else []
    metric = (results[0].metric if results else None) or "metric"
    table = Table()
    for name in (*keys, metric, "step", "time", "state"):
        table.add_column(name, overflow="fold", justify="left" if name == "state" else "right")
    for result in results:
        cells = [str(result.swept[key]) for key in keys]
        cells.append("" if result.value is None else f"{result.value:.5g}")
        cells.append("" if result.step is None else str(result.step))
        cells += [format_seconds(result.seconds), result.state]
        style = "bold" if result is best else ""
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


@dataclass(frozen=True)
class Curves:
    """What the picture shows: the metric over ``x``, a line a combination of the other values."""

    x: str
    metric: str
    lines: dict[str, list[tuple[float, float]]]

    @property
    def log_axis(self) -> bool:
        """Whether the values of ``x`` span more than a factor of 10."""
        values = [x for points in self.lines.values() for x, _ in points]
        return min(values) > 0 and max(values) / min(values) > _LOG_AXIS_FROM


def curves_of(results: Sequence[Result]) -> Curves | None:
    """Returns the curves over the first swept key that has only numbers; ``None`` where none
    has."""
    keys = list(results[0].swept) if results else []
    x = next((key for key in keys if all(is_number(r.swept[key]) for r in results)), None)
    metric = results[0].metric if results else None
    if x is None or metric is None:
        return None
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        at = result.swept[x]
        if result.value is None or result.state != "done" or not isinstance(at, (int, float)):
            continue
        label = ", ".join(f"{key}={result.swept[key]}" for key in keys if key != x)
        lines.setdefault(label, []).append((float(at), result.value))
    if not lines:
        return None
    return Curves(x, metric, {label: sorted(points) for label, points in lines.items()})


def draw(curves: Curves, path: Path) -> None:
    """Draws the curves into a PNG.

    Raises:
        ImportError: There is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    for label, points in curves.lines.items():
        xs, values = zip(*points, strict=True)
        axes.plot(xs, values, label=label or None, marker="o")
    if curves.log_axis:
        axes.set_xscale("log")
    axes.set_xlabel(curves.x)
    axes.set_ylabel(curves.metric)
    axes.grid(visible=True, alpha=0.3)
    if any(curves.lines):
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _last(rows: Sequence[Row], name: str) -> float | None:
    found = (row[name] for row in reversed(rows) if isinstance(row.get(name), (int, float)))
    return next(found, None)


def _last_step(rows: Sequence[Row]) -> int | None:
    return next((row["step"] for row in reversed(rows) if isinstance(row.get("step"), int)), None)
