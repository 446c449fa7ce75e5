"""Draws games.png from games.jsonl: `python benchmarks/studies/games_curves.py`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

PANELS = (
    ("tictactoe", "test/env/all/loss", "tic-tac-toe: lost against the optimal player"),
    ("tictactoe", "test/env/all/draw", "tic-tac-toe: draws against the optimal player"),
)
LABELS = {
    "0": "seed 0",
    "1": "seed 1",
    "2": "seed 2",
    "control": "random rewards",
    "self only": "self-play without the pool",
    "no losses 0": "against the optimal player, greedy, seed 0",
    "no losses 1": "against the optimal player, greedy, seed 1",
}


def main() -> None:
    """One panel a measure, one line a run."""
    here = Path(__file__).parents[2] / "docs" / "benchmarks"
    points = pd.read_json(here / "games.jsonl", lines=True, dtype={"run": str})
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    for axes, (game, measure, title) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for run, label in LABELS.items():
            line = points[(points["game"] == game) & (points["run"] == run)]
            line = line[line[measure].notna()]
            if line.empty:
                continue
            style = {"linestyle": "--", "color": "gray"} if run == "control" else {}
            if run == "self only":
                style = {"linestyle": ":", "color": "black"}
            axes.plot(line["step"], line[measure], label=label, **style)
        axes.set(xlabel="step")
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=-0.02)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(here / "games.png", dpi=100)


if __name__ == "__main__":
    main()
