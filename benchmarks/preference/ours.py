"""The process of our side: runs the recipe and reads its metrics."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import run_worker
from benchmarks.preference.config import recipe_settings


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds and loss of every training step."""
    from tinker_cookbook.preference import train_dpo

    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "run"
        train_dpo.main(recipe_settings(job, log_path))
        lines = (log_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "dpo_loss" in row]
    return {
        "seconds": [row["time/step"] for row in steps],
        "losses": [row["dpo_loss"] for row in steps],
        "tokens": [row["num_tokens"] for row in steps],
        "notes": [],
    }


if __name__ == "__main__":
    sys.exit(run_worker(run, *sys.argv[1:]))
