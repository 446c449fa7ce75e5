"""The process of our side: runs the recipe and reads its metrics."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import run_worker
from benchmarks.rl.config import recipe_settings

_REWARD = "env/all/reward/total"
_PARTS = {"sampling": "time/sampling", "training": "time/train"}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds and mean reward of every step."""
    from tinker_cookbook.recipes.rl_basic import main

    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "run"
        asyncio.run(main(recipe_settings(job, log_path)))
        return read_metrics(log_path / "metrics.jsonl")


def read_metrics(path: Path) -> dict[str, Any]:
    """Returns the figures of the steps, without rows of evaluations only."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if _REWARD in row and "time/total" in row]
    return {
        "seconds": [row["time/total"] for row in steps],
        "rewards": [row[_REWARD] for row in steps],
        "parts": {name: [row.get(key) for row in steps] for name, key in _PARTS.items()},
        "notes": [],
    }


if __name__ == "__main__":
    sys.exit(run_worker(run, *sys.argv[1:]))
