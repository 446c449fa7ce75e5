"""Runs that never ran, with files of metrics."""

from __future__ import annotations

import json
from pathlib import Path

from tinker_cookbook.sweep.arguments import make_points
from tinker_cookbook.sweep.runs import SweepRun


def write_rows(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_runs(folder: Path, grid: dict[str, list[str]], recipe: str = "recipes.sl_loop", **extra):
    return [
        SweepRun(point, recipe, {**point.settings, **extra}, folder / point.name)
        for point in make_points(grid)
    ]
