"""Runs that never ran: their files, and jobs that point to them."""

from __future__ import annotations

import json
from pathlib import Path

from tinker_cookbook.sweep.grid import make_runs
from tinker_cookbook.sweep.jobs import Job
from tinker_cookbook.sweep.records import Record
from tinker_cookbook.sweep.watch import Watch


def write_rows(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_jobs(folder: Path, grid: dict[str, list[str]], recipe: str = "recipes.sl_loop"):
    jobs = []
    for run in make_runs(grid):
        place = folder / run.name
        watch = Watch(place / "metrics.jsonl")
        log = folder / f"{run.name}.log"
        jobs.append(Job(run, place, Record(recipe, dict(run.settings)), watch, log))
    return jobs
