"""Runs the arms of a study for several seeds: table, ``results.json`` and picture.

A study is a module with settings that extend ``StudyConfig``, and a ``main`` that calls
``run_study`` with its arms.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import chz
from rich.table import Table

from tinker_cookbook.exceptions import ConfigurationError, install_command
from tinker_cookbook.plot import save_figure
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import local_path, write_atomically
from tinker_cookbook.utils.terminal import format_seconds, get_console, print_line

Row = dict[str, Any]
"""Result of one arm and seed, as JSON: numbers for the table, lists for curves. ``run_study`` adds
``arm``, ``seed`` and ``seconds`` of CPU time."""
Arm = Callable[[int], Row]
"""Runs an arm with a seed."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that colour-blind people can tell apart (Okabe and Ito 2008)."""


@chz.chz
class StudyConfig:
    """Settings that every study has."""

    log_path: str = chz.field(doc="Folder of results.json and the picture")
    seeds: list[int] = chz.field(
        default_factory=lambda: [0, 1, 2], doc="Seeds of each arm, separated by commas"
    )
    quick: bool = chz.field(
        default=False,
        doc="Only tries the command: one arm of a model that is hardly trained, in LOG_PATH/quick. "
        "It sets the numbers of steps itself, and its results mean nothing",
    )

    @chz.validate
    def _check_seeds(self) -> None:
        # A seed that stands twice would count twice in the means.
        if not self.seeds or len({*self.seeds}) < len(self.seeds) or min(self.seeds) < 0:
            raise ConfigurationError(
                f"seeds: got {self.seeds}, expected different numbers from 0 on, such as 0,1,2"
            )

    def if_quick(self, **settings: Any) -> Self:
        """Returns the settings of a quick run, in a folder of its own, if it is one."""
        if not self.quick:
            return self
        return chz.replace(self, log_path=f"{self.log_path}/quick", **settings)


def run_study(
    config: StudyConfig,
    arms: Mapping[str, Arm],
    columns: Mapping[str, str],
    draw: Callable[[Any, dict[str, list[Row]]], None],
) -> list[Row]:
    """Runs each arm with each seed, unless ``results.json`` has it already; returns their rows.

    Args:
        columns: Heading by the key of a row; the table has mean, minimum and maximum over the
            seeds.
        draw: Draws on a figure of matplotlib, given the rows of each arm.

    Raises:
        ConfigurationError: ``log_path`` has results with other settings.
    """
    folder = local_path(config.log_path, "log_path")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    settings = {k: v for k, v in chz.asdict(config).items() if k not in ("log_path", "seeds")}
    if config.quick:
        arms = dict(list(arms.items())[:1])
    with RunLock(folder, "log_path"):
        rows = _earlier(path, settings)
        done = {(row["arm"], row["seed"]) for row in rows}
        # Seed by seed, so that an interrupted study compares all arms.
        todo = [(n, s) for s in config.seeds for n in arms if (n, s) not in done]
        for number, (name, seed) in enumerate(todo, 1):
            # CPU time of all threads: comparable on a machine that does other work too.
            started = time.process_time()
            row = arms[name](seed)
            seconds = time.process_time() - started
            rows.append({"arm": name, "seed": seed, "seconds": round(seconds, 1), **row})
            # After each arm: the same command continues from here.
            content = {"settings": settings, "rows": rows}
            write_atomically(path, json.dumps(content, indent=1).encode())
            values = "  ".join(f"{title} {row[key]:.4g}" for key, title in columns.items())
            took = format_seconds(seconds)
            print_line(f"{number}/{len(todo)}  {name}  seed {seed}  {values}  {took}")
    # An earlier run may have had more seeds.
    rows = [row for row in rows if row["seed"] in config.seeds]
    of_arm = {name: [row for row in rows if row["arm"] == name] for name in arms}
    get_console().print(_table(of_arm, columns))
    if config.quick:
        print_line(
            "quick=true only tries the command: its model is hardly trained, so these "
            "numbers mean nothing"
        )
    print_line(str(path))
    print_line(_picture(folder / "study.png", draw, of_arm))
    return rows


def _earlier(path: Path, settings: Row) -> list[Row]:
    """Returns the rows of an earlier run of the same study."""
    if not path.exists():
        return []
    found = json.loads(path.read_bytes())
    settings = json.loads(json.dumps(settings))  # a tuple is a list in JSON
    for key in {**found["settings"], **settings}:
        if (before := found["settings"].get(key)) != (now := settings.get(key)):
            raise ConfigurationError(
                f"{key}: got {now}, but {path} has results with {before}; set another log_path, "
                "or delete the folder"
            )
    return found["rows"]


def _table(of_arm: Mapping[str, Sequence[Row]], columns: Mapping[str, str]) -> Table:
    table = Table()
    table.add_column("arm")
    for title in (*columns.values(), "CPU seconds"):
        table.add_column(title, justify="right")
    for name, rows in of_arm.items():
        cells = [spread([row[key] for row in rows]) for key in (*columns, "seconds")]
        table.add_row(name, *cells)
    return table


def spread(values: Sequence[float]) -> str:
    """Returns ``mean (minimum - maximum)``."""
    mean = f"{sum(values) / len(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3g} - {max(values):.3g})"


def _picture(path: Path, draw: Callable[[Any, Any], None], of_arm: Mapping[str, Any]) -> str:
    """Returns the path of the picture, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return f"no picture: it needs matplotlib: {install_command('plot')}"
    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 4.2), constrained_layout=True)
    draw(figure, dict(of_arm))
    save_figure(figure, path, "log_path")
    return str(path)


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and the up to four before it."""
    windows = (values[max(0, i - 4) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw_curve(
    axes: Any, rows: Sequence[Row], x: str, y: str, label: str, colour: str, style: str = "-"
) -> None:
    """Draws the mean of the seeds' curves ``row[y]`` over ``row[x]``, and their range."""
    values = list(zip(*(row[y] for row in rows), strict=True))
    means = [sum(at) / len(at) for at in values]
    axes.plot(rows[0][x], means, color=colour, linestyle=style, label=label)
    lows, highs = [min(at) for at in values], [max(at) for at in values]
    axes.fill_between(rows[0][x], lows, highs, color=colour, alpha=0.15, linewidth=0)


def finish_axes(axes: Any, title: str, x: str, y: str, *, legend: bool = True) -> None:
    """Adds title, labels, grid and legend."""
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(visible=True, alpha=0.3)
    if legend:
        axes.legend(fontsize=8)
