"""The comparison with TRL: our side for real, its side's data, and the report's arithmetic."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import run_worker
from benchmarks.preference import ours


@pytest.fixture
def job(stories_model):
    return {
        "model_name": stories_model,
        "renderer_name": "role_colon",
        "device": "cpu",
        "dtype": "float32",
        "steps": 3,
        "dataset": "example",
        "batch_size": 4,
        "max_length": 128,
        "dpo_beta": 0.1,
        "lora_rank": 4,
        "train_unembed": False,
        "learning_rate": 1e-3,
        "seed": 0,
    }


def test_our_side_runs_the_recipe(job, tmp_path):
    job["max_length"] = 256
    job["batch_size"] = 2
    job_file, result_file = tmp_path / "job.json", tmp_path / "result.json"
    job_file.write_text(json.dumps(job))
    run_worker(ours.run, str(job_file), str(result_file))
    found = json.loads(result_file.read_text())
    assert found["status"] == "ok", found
    assert len(found["seconds"]) == len(found["losses"]) == 3
    assert found["losses"][0] == pytest.approx(0.6931, abs=1e-3)
