"""Running the RL loop in a test, and reading what it left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np

from tinker_cookbook.rl import train


def run(config) -> list[dict]:
    """Trains; gives the rows of ``metrics.jsonl``."""
    asyncio.run(train.main(config))
    return rows(config.log_path)


def named_phases(monkeypatch) -> list[str]:
    """The phases that a run names from now on, each once in a row."""
    from tinker_cookbook.utils.activity import Activity

    named, original = [], Activity.phase

    def phase(self, name, *args):
        if named[-1:] != [name]:
            named.append(name)
        return original(self, name, *args)

    monkeypatch.setattr(Activity, "phase", phase)
    return named


def rows(log_path) -> list[dict]:
    lines = (Path(log_path) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def adapter(log_path) -> dict[str, np.ndarray]:
    """The tensors of the last checkpoint."""
    from safetensors.numpy import load_file

    from tinker_cookbook.engine.home import home_dir

    line = (Path(log_path) / "checkpoints.jsonl").read_text().splitlines()[-1]
    run_id, kind, name = json.loads(line)["state_path"].removeprefix("tinker://").split("/")
    return load_file(home_dir() / "runs" / run_id / kind / name / "adapter_model.safetensors")


def without_times(row: dict) -> dict:
    """The row without what depends on the moment: times, and prompt tokens found in a cache."""
    moment = ("time/", "tokens/prefill_")
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(moment) and not key.endswith("total_cached_ob_tokens")
    }
