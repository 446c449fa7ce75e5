"""The comparison with TRL: our side for real, its side's task, and the report's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import run_worker
from benchmarks.rl import ours


@pytest.fixture
def job(stories_model: str) -> dict:
    return {
        "model_name": stories_model,
        "renderer_name": "role_colon",
        "device": "cpu",
        "dtype": "float32",
        "steps": 2,
        "groups_per_batch": 3,
        "group_size": 2,
        "max_tokens": 4,
        "lora_rank": 4,
        "train_unembed": False,
        "learning_rate": 1e-3,
        "seed": 0,
        "trl_batch_size": None,
        "trl_gradient_checkpointing": False,
    }


def _worked(run, job: dict, folder: Path) -> dict:
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job))
    run_worker(run, str(job_file), str(result_file))
    return json.loads(result_file.read_text())


def test_our_side_runs_the_recipe(job: dict, tmp_path: Path) -> None:
    found = _worked(ours.run, job, tmp_path)
    assert found["status"] == "ok", found
    assert len(found["seconds"]) == len(found["rewards"]) == 2
    assert all(-0.101 < reward <= 1 for reward in found["rewards"])
    for seconds, sampling, training in zip(
        found["seconds"], found["parts"]["sampling"], found["parts"]["training"], strict=True
    ):
        assert 0 < sampling < seconds
        assert 0 <= training < seconds
    assert found["peak_bytes"] > 50 << 20
