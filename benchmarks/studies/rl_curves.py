"""Draws rl-curves.png from rl-curves.jsonl: `python benchmarks/studies/rl_curves.py`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

TITLES = {
    "a": "names a dog or a cat (260k story model)",
    "b": "one-digit addition (SmolLM2-135M)",
    "c": "guess the number, 3 turns (SmolLM2-135M)",
}
LABELS = {"0": "seed 0", "1": "seed 1", "2": "seed 2", "control": "random rewards"}


def main() -> None:
    """One panel a task, one line a run; the runs with random rewards are dashed."""
    here = Path(__file__).parents[2] / "docs" / "benchmarks"
    points = pd.read_json(here / "rl-curves.jsonl", lines=True, dtype={"run": str})
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, 3), TITLES.items(), strict=True):
        for run, label in LABELS.items():
            line = points[(points["task"] == task) & (points["run"] == run)]
            style = {"linestyle": "--", "color": "gray"} if run == "control" else {}
            axes.plot(line["step"], line["score"], label=label, **style)
        axes.set(title=title, xlabel="step", ylim=(-0.03, 1.03))
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share right")
    figure.axes[1].legend(fontsize=8)
    figure.savefig(here / "rl-curves.png", dpi=100)


if __name__ == "__main__":
    main()
