"""Runs the arms of a study for several seeds: table, ``results.json`` and picture.

A study is a module with settings that extend ``StudyConfig``, and a ``main`` that calls
``run_study`` with its arms.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import chz
from rich.table import Table

from tinker_cookbook.exceptions import ConfigurationError, install_command
from tinker_cookbook.plot import save_figure
from tinker_cookbook.run.lock import RunLock
from tinker_cookbook.run.paths import ensure_writable_dir, write_atomically
from tinker_cookbook.training.setting_lines import changed
from tinker_cookbook.utils.terminal import format_seconds, get_console, print_line

Row = dict[str, Any]
"""Result of one arm and seed, as JSON: numbers for the table, lists for curves. ``run_study`` adds
``arm``, ``seed`` and ``seconds`` of CPU time."""
Arm = Callable[[int], Row]
"""Runs an arm with a seed."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that colour-blind people can tell apart (Okabe and Ito 2008)."""


def several(values: list[Any], doc: str) -> Any:
    """Returns a chz field for a list."""
    return chz.field(default_factory=lambda: list(values), doc=f"{doc}, separated by commas")


@chz.chz
class StudyConfig:
    """Settings that every study has."""

    log_path: str = chz.field(doc="Folder of results.json and the picture")
    seeds: list[int] = several([0, 1, 2], "Seeds of each arm")
    quick: bool = chz.field(
        default=False,
        doc="Only tries the command: one arm of a model that is hardly trained, in LOG_PATH/quick. "
        "It sets the numbers of steps that are not given, and its results mean nothing",
    )

    @chz.validate
    def _check_lists(self) -> None:
        # A seed or another value that stands twice would count twice in the means.
        for name, values in chz.asdict(self).items():
            if isinstance(values, list) and not (
                0 < len(values) == len({*values})
                and all(isinstance(one, str) or 0 <= one < math.inf for one in values)
            ):
                raise ConfigurationError(
                    f"{name}: got {values}, expected different numbers from 0 on, separated by "
                    "commas, such as 0,1,2"
                )

    def resolved(self, **quick: Any) -> Self:
        """Returns the settings to run with: of a quick run with the values of ``quick`` for what
        is not given, in a folder of its own.

        Raises:
            ConfigurationError: ``log_path`` has results with other settings, or cannot be written.
        """
        config = self
        if self.quick:
            given = dict(changed(self))
            quick = {name: value for name, value in quick.items() if name not in given}
            config = chz.replace(self, log_path=f"{self.log_path}/quick", **quick)
        _earlier(config)  # here, because the study makes its model next
        return config


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
        ConfigurationError: ``log_path`` has results with other settings, or cannot be written.
    """
    path = _results(config)
    folder = path.parent
    if config.quick:
        arms = dict(list(arms.items())[:1])
    with RunLock(folder, "log_path"):
        rows = _earlier(config)
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
            content = {"settings": _settings(config), "rows": rows}
            write_atomically(path, json.dumps(content, indent=1).encode())
            values = "  ".join(f"{title} {row[key]:.4g}" for key, title in columns.items())
            took = format_seconds(seconds)
            print_line(f"{number}/{len(todo)}  {name}  seed {seed}  {values}  {took}")
    # An earlier run may have had more seeds.
    rows = [row for row in rows if row["seed"] in config.seeds]
    of_arm = {name: [row for row in rows if row["arm"] == name] for name in arms}
    _print_tables(of_arm, columns)
    if config.quick:
        print_line(
            "quick=true only tries the command: its model is hardly trained, so these "
            "numbers mean nothing"
        )
    print_line(str(path))
    print_line(_picture(folder / "study.png", draw, of_arm))
    return rows


def _results(config: StudyConfig) -> Path:
    return ensure_writable_dir(config.log_path) / "results.json"


def _settings(config: StudyConfig) -> Row:
    """Returns the settings that all rows of a study share."""
    return {k: v for k, v in chz.asdict(config).items() if k not in ("log_path", "seeds")}


def _earlier(config: StudyConfig) -> list[Row]:
    """Returns the rows of an earlier run of the same study."""
    path = _results(config)
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_bytes())
        earlier, rows = found["settings"], found["rows"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"log_path: {path} is not the result of a study ({error}); delete it, or set another "
            "log_path"
        ) from error
    settings = json.loads(json.dumps(_settings(config)))  # a tuple is a list in JSON
    for key in {**earlier, **settings}:
        before, now = earlier.get(key, "no such setting"), settings.get(key, "no such setting")
        if before != now:
            raise ConfigurationError(
                f"{key}: got {now}, but {path} has results with {before}; set another log_path, "
                "or delete the folder"
            )
    return rows


def _print_tables(of_arm: Mapping[str, Sequence[Row]], columns: Mapping[str, str]) -> None:
    """Prints the arms with all columns, in as many tables as the width of the terminal needs."""
    left = [*columns.items(), ("seconds", "CPU seconds")]
    console = get_console()
    wide = console.options.update(max_width=10_000, markup=False)  # [a] is part of a name
    while left:
        count = len(left)
        while count > 1 and (
            console.measure(_table(of_arm, left[:count]), options=wide).maximum > console.width
        ):
            count -= 1
        console.print(_table(of_arm, left[:count]), "", markup=False)
        left = left[count:]


def _table(of_arm: Mapping[str, Sequence[Row]], columns: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("arm")
    for _, title in columns:
        table.add_column(title, justify="right")
    for name, rows in of_arm.items():
        table.add_row(name, *(spread([row[key] for row in rows]) for key, _ in columns))
    return table


def spread(values: Sequence[float]) -> str:
    """Returns ``mean (minimum–maximum)``."""
    mean, low, high = (
        f"{one:.3g}" if abs(one) < 1000 else f"{one:,.0f}"
        for one in (sum(values) / len(values), min(values), max(values))
    )
    return mean if len(values) == 1 else f"{mean} ({low}–{high})"


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
    """Adds title, labels, grid, and the legend of the curves that there are."""
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(visible=True, alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def legend_below(figure: Any, axes: Any, columns: int = 2) -> None:
    """Adds one legend for all panels, with the curves of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
