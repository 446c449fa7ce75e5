"""Plots metrics of a run, which are columns of ``metrics.jsonl``.

python -m tinker_cookbook.plot log_path=/tmp/tinker-examples/sl_basic
python -m tinker_cookbook.plot log_path=… metrics=train_mean_nll,test/nll output=curves.png
"""

from __future__ import annotations

from pathlib import Path

import chz

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    install_command,
    nearest_sentence,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.run_folder.jsonl import read_rows

_DEFAULT_METRICS = "train_mean_nll,test/nll,reward/total,test/env/all/reward/total"


@chz.chz
class PlotConfig:
    """Settings of the plot."""

    log_path: str = chz.field(doc="Folder of the run")
    metrics: str = chz.field(
        default=_DEFAULT_METRICS,
        doc="Comma-separated names in metrics.jsonl; missing default names are skipped",
    )
    output: str | None = chz.field(default=None, doc="PNG to write; default: LOG_PATH/curves.png")


def main(config: PlotConfig) -> None:
    """Writes a plot and prints its path."""
    print(write_plot(config))


def write_plot(config: PlotConfig) -> Path:
    """Writes a plot with one line per metric over the steps; returns its path."""
    rows = read_rows(Path(config.log_path) / "metrics.jsonl")
    if not rows:
        raise DataError(f"{config.log_path}: metrics.jsonl has no rows yet; is log_path right?")
    known = sorted({key for row in rows for key in row})
    curves: dict[str, list[tuple[float, float]]] = {}
    for name in filter(None, map(str.strip, config.metrics.split(","))):
        # A metric may be only in some rows, such as rows with evaluations.
        points = [
            (row["step"], row[name])
            for row in rows
            if "step" in row and isinstance(row.get(name), (int, float))
        ]
        if points:
            curves[name] = points
        # A missing name is an error only if the user gave it; no run logs all default names.
        elif config.metrics != _DEFAULT_METRICS:
            raise ConfigurationError(
                f"metrics: {name!r} is in no row of {config.log_path}/metrics.jsonl"
                f"{nearest_sentence(name, known)} It has: {', '.join(known)}"
            )
    if not curves:
        raise ConfigurationError(
            f"metrics: none of {config.metrics} is in {config.log_path}/metrics.jsonl; it has: "
            f"{', '.join(known)}"
        )
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(f"plotting needs matplotlib: {install_command('plot')}") from error
    # A backend that renders to files, so that no display is needed.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    for name, points in curves.items():
        steps, values = zip(*points, strict=True)
        # Use markers only for few points, because they would hide a long curve.
        axes.plot(steps, values, label=name, marker="o" if len(points) < 20 else None)
    axes.set_xlabel("step")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path = Path(config.output or Path(config.log_path) / "curves.png")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no folder, or a suffix that matplotlib does not know
        raise ConfigurationError(f"output: {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
    return path


if __name__ == "__main__":
    run_entrypoint(main)
