"""Draws distillation.png: `python docs/benchmarks/distillation_curves.py`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

WAYS = {"on-policy": "C0", "rl": "C1", "off-policy": "C2"}
STYLES = {3.3e-4: "-", 1.3e-3: "--"}
PANELS = {
    "kl": "KL from the teacher, nats an answer (of the student's own)",
    "right": "held-out sums, share right",
}


def main() -> None:
    """One panel a figure, one line a way and learning rate: the mean over the seeds."""
    here = Path(__file__).parent
    points = pd.read_json(here / "distillation.jsonl", lines=True)
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, (column, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for (way, rate), found in points[points[column].notna()].groupby(["way", "rate"]):
            mean = found.groupby("step")[column].mean()
            look = {"color": WAYS[way], "linestyle": STYLES[rate], "marker": "o", "markersize": 3}
            axes.plot(mean.index, mean, label=f"{way}, learning rate {rate:g}", **look)
        axes.set(xlabel="updates of 64 answers", xticks=range(0, 21, 5))
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].set_yscale("symlog", linthresh=0.1)
    figure.axes[1].set_ylim(-0.03, 1.03)
    figure.axes[1].legend(fontsize=8)
    figure.savefig(here / "distillation.png", dpi=100)


if __name__ == "__main__":
    main()
