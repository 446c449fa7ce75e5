"""Draws distillation.png and long-answers.png: `benchmarks/studies/distillation_curves.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

COLOURS = {
    "on-policy": "C0",
    "on-policy, sampled tokens": "C0",
    "on-policy, distributions": "C3",
    "rl": "C1",
    "off-policy": "C2",
}


@dataclass(frozen=True)
class Chart:
    """``NAME.jsonl``, the titles of both panels, and the line styles of learning rates."""

    name: str
    kl: str
    right: str
    styles: dict[float, str]


CHARTS = (
    Chart(
        "distillation",
        "KL(student ‖ teacher) per sampled answer, nats",
        "share of right answers on held-out sums",
        {3.3e-4: "-", 1.3e-3: "--"},
    ),
    Chart(
        "long-answers",
        "KL(student ‖ teacher) per answer of 48 tokens, nats",
        "share of answers with a dog or a cat",
        {1e-3: "--", 2e-3: "-"},
    ),
)


def plot(folder: Path, chart: Chart) -> None:
    """Draws a panel per metric, and a line per method and learning rate: the mean of the seeds."""
    points = pd.read_json(folder / f"{chart.name}.jsonl", lines=True)
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    titles = {"kl": chart.kl, "right": chart.right}
    for axes, (column, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for (way, rate), found in points[points[column].notna()].groupby(["way", "rate"]):
            mean = found.groupby("step")[column].mean()
            look = {"color": COLOURS[way], "linestyle": chart.styles[rate], "marker": "o"}
            label = f"{'RL' if way == 'rl' else way}, learning rate {rate:g}"
            axes.plot(mean.index, mean, label=label, markersize=3, **look)
        axes.set(xlabel="updates of 64 answers", xticks=range(0, 21, 5))
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    if points["kl"].min() < 1:
        figure.axes[0].set_yscale("symlog", linthresh=0.1)
        figure.axes[0].set_ylim(bottom=-0.02)
    else:
        figure.axes[0].set_yscale("log")
    figure.axes[1].set_ylim(-0.03, 1.03)
    figure.axes[1].legend(fontsize=8)
    figure.savefig(folder / f"{chart.name}.png", dpi=100)


if __name__ == "__main__":
    for each in CHARTS:
        plot(Path(__file__).parents[2] / "docs" / "benchmarks", each)
