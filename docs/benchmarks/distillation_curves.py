"""Draws distillation.png: `python docs/benchmarks/distillation_curves.py`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

WAYS = {"on-policy": "C0", "rl": "C1", "off-policy": "C2"}
PANELS = {
    "kl": "KL from the teacher, nats an answer (of the student's own)",
    "right": "held-out sums, share right",
}


def main() -> None:
    """One panel a figure; the mean of the seeds, and each seed as a thin line."""
    here = Path(__file__).parent
    points = pd.read_json(here / "distillation.jsonl", lines=True)
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, (column, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for way, color in WAYS.items():
            found = points[(points["way"] == way) & points[column].notna()]
            for _, line in found.groupby("seed"):
                axes.plot(line["step"], line[column], color=color, alpha=0.3, linewidth=0.8)
            mean = found.groupby("step")[column].mean()
            axes.plot(mean.index, mean, color=color, label=way, marker="o", markersize=3)
        axes.set(xlabel="updates of 64 answers")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].set_yscale("log")
    figure.axes[1].set_ylim(-0.03, 1.03)
    figure.axes[1].legend(fontsize=9)
    figure.savefig(here / "distillation.png", dpi=100)


if __name__ == "__main__":
    main()
