"""Plots metrics of a run, which are columns of ``metrics.jsonl``.

python -m tinker_cookbook.plot log_path=/tmp/tinker-examples/sl_basic
python -m tinker_cookbook.plot log_path=FOLDER,OTHER_FOLDER metrics=test/nll output=curves.png
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    install_command,
    nearest_sentence,
)
from tinker_cookbook.run.paths import METRICS_FILE, local_path
from tinker_cookbook.run.scan import read_run_folder
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

_DEFAULT_METRICS = "train_mean_nll,test/nll,accuracy,reward/total,test/env/all/reward/total"


@chz.chz
class PlotConfig:
    """Settings of the plot."""

    log_path: str = chz.field(doc="Folder of the run; several, comma-separated, in one picture")
    metrics: str = chz.field(
        default=_DEFAULT_METRICS,
        doc="Comma-separated names in metrics.jsonl; missing default names are skipped",
    )
    output: str | None = chz.field(
        default=None, doc="PNG to write; default: curves.png in the first LOG_PATH"
    )


def main(config: PlotConfig) -> None:
    """Writes a plot and prints its path."""
    print(write_plot(config))


def write_plot(config: PlotConfig) -> Path:
    """Writes a plot with one line per metric and run over the steps; returns its path.

    Metrics whose names end in one word, such as ``test/nll`` and ``train_mean_nll``, share a panel.
    """
    whole = local_path(config.log_path)
    # A folder of a sweep may have commas in its name.
    parts = [whole] if whole.is_dir() else config.log_path.split(",")
    folders = [local_path(str(part).strip()) for part in parts]
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for folder, label in zip(folders, short_labels(folders), strict=True):
        for name, values in _curves_of(folder, config.metrics).items():
            # Others have another unit: on the scale of a loss an accuracy is flat.
            panel = panels.setdefault(re.split("[/_]", name)[-1], {})
            panel[f"{label} {name}".strip()] = values
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(f"plotting needs matplotlib: {install_command('plot')}") from error
    # A backend that renders to files, so that no display is needed.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(7, 1.5 + 2.5 * len(panels)),
        sharex=True,
        squeeze=False,
        constrained_layout=True,
    )
    for one, panel in zip(axes[:, 0], panels.values(), strict=True):
        for name, points in panel.items():
            steps, values = zip(*sorted(points.items()), strict=True)
            # Use markers only for few points, because they would hide a long curve.
            one.plot(steps, values, label=name, marker="o" if len(points) < 20 else None)
        one.grid(visible=True, alpha=0.3)
        one.legend()
    axes[-1, 0].set_xlabel("step")
    path = Path(config.output or folders[0] / "curves.png")
    save_figure(figure, path, "output")
    return path


def save_figure(figure: Any, path: str | Path, key: str) -> None:
    """Writes a figure of matplotlib and closes it; ``ConfigurationError`` names the setting ``key``
    if it cannot be written."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no folder, or a suffix that matplotlib does not know
        raise ConfigurationError(f"{key}: {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _curves_of(folder: Path, metrics: str) -> dict[str, dict[int, float]]:
    """Returns the values by step of the metrics of one run."""
    if not folder.is_dir():
        raise ConfigurationError(f"log_path: {folder}: there is no such folder")
    run = read_run_folder(folder)
    if run.problem is not None:
        raise DataError(f"log_path: {run.problem}")
    if not run.rows:
        raise DataError(f"log_path: {folder} has no {METRICS_FILE} with rows (yet)")
    known = sorted({key for row in run.rows for key in row})
    curves: dict[str, dict[int, float]] = {}
    for name in filter(None, map(str.strip, metrics.split(","))):
        # A metric may be only in some rows, such as rows with evaluations.
        if values := run.values(name):
            curves[name] = values
        # A missing name is an error only if the user gave it; no run logs all default names.
        elif metrics != _DEFAULT_METRICS:
            raise ConfigurationError(
                f"metrics: {name!r} is in no row of {folder}/{METRICS_FILE}"
                f"{nearest_sentence(name, known)} It has: {', '.join(known)}"
            )
    if not curves:
        raise ConfigurationError(
            f"metrics: none of {metrics} is in {folder}/{METRICS_FILE}; it has: {', '.join(known)}"
        )
    return curves


def short_labels(folders: Sequence[Path]) -> list[str]:
    """Returns the last parts of the paths that tell them apart, ``""`` for a single one."""
    if len(folders) == 1:
        return [""]
    for count in range(1, max(len(folder.parts) for folder in folders)):
        labels = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(labels)) == len(labels):
            return labels
    return list(map(str, folders))


if __name__ == "__main__":
    run_entrypoint(main)
