"""Learning curves of recipes.tool_use: three seeds, and random rewards as the control.

python benchmarks/studies/tool_curves.py run FOLDER     # four runs, one after the other
python benchmarks/studies/tool_curves.py                # draws tool-use.png from tool-use.jsonl
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

HERE = Path(__file__).parents[2] / "docs" / "benchmarks"
RUNS = {
    "seed 0": ["seed=0"],
    "seed 1": ["seed=1"],
    "seed 2": ["seed=2"],
    "random rewards": ["seed=0", "random_rewards=true"],
}
METRICS = {
    "right_calls": "calls that the question needs, share",
    "right_answer": "right answers, share",
}


def run(folder: Path) -> None:
    """Trains the runs in FOLDER and writes the points of their evaluations."""
    points = []
    for name, settings in RUNS.items():
        log_path = folder / name.replace(" ", "-")
        command = [sys.executable, "-m", "recipes.tool_use.train", *settings]
        began = time.monotonic()
        subprocess.run(
            [*command, f"log_path={log_path}", "behavior_if_log_dir_exists=delete"], check=True
        )
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        for line in (log_path / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            found = {key: row.get(f"test/env/all/{key}") for key in METRICS}
            if None not in found.values():
                points.append({"run": name, "step": row["step"], **found})
        # After each run, so that an interruption keeps the finished ones.
        text = "".join(json.dumps(point) + "\n" for point in points)
        (HERE / "tool-use.jsonl").write_text(text)


def draw() -> None:
    """One panel a metric, one line a run; the run with random rewards is dashed."""
    points = pd.read_json(HERE / "tool-use.jsonl", lines=True)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, 2), METRICS.items(), strict=True):
        for name in RUNS:
            line = points[points["run"] == name]
            style = {"linestyle": "--", "color": "gray"} if name == "random rewards" else {}
            axes.plot(line["step"], line[metric], label=name, **style)
        axes.set(title=title, xlabel="step", ylim=(-0.03, 1.03))
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(HERE / "tool-use.png", dpi=100)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]))
    draw()
