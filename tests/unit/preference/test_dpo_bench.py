"""The comparison with TRL: our side for real, its side's data, and the report's arithmetic."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks import trl_comparison
from benchmarks.harness import run_worker
from benchmarks.preference import ours, trl_side
from benchmarks.preference.comparison import COMPARISON, run_benchmark
from benchmarks.preference.config import Config
from tinker_cookbook.exceptions import DataValidationError


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


def test_trl_gets_our_pairs(job):
    job["max_length"] = 512
    rows, config = trl_side.read_pairs(job | {"batch_size": 1, "steps": 2})
    assert config.learning_rate == 1e-3
    assert len(rows) == 2
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    tokenizer = get_tokenizer(job["model_name"])
    assert tokenizer.decode(rows[0]["prompt_ids"]).endswith("Assistant:")
    assert rows[0]["chosen_ids"] != rows[0]["rejected_ids"]


def test_a_job_that_trl_could_not_do_ends_before_ours_runs(stories_model, monkeypatch):
    monkeypatch.setattr(trl_comparison, "has_trl", lambda python: True)
    monkeypatch.setattr(trl_comparison, "run_side", lambda *_: pytest.fail("a side was run"))
    settings = {"model_name": stories_model, "renderer_name": "role_colon", "device": "cpu"}
    with pytest.raises(DataValidationError, match="raise max_length"):
        run_benchmark(Config(**settings, max_length=64))


def test_report():
    def run(seconds, losses):
        return {
            "status": "ok",
            "seconds": seconds,
            "losses": losses,
            "peak_bytes": 1 << 30,
            "notes": [],
        }

    settings = {"model_name": "m", "dtype": "float32", "steps": 3, "batch_size": 8}
    settings["max_length"] = 512
    runs = {
        "ours": [run([9.0, 1.0, 1.0], [0.7, 0.6, 0.51])],
        "trl": [run([2.0] * 3, [0.7, 0.6, 0.5])],
    }
    result = trl_comparison.build(COMPARISON, settings, {}, runs, [])
    assert result["ratio"]["step_seconds"]["median"] == 0.5
    assert result["loss_difference"] == pytest.approx(0.02)
    out = io.StringIO()
    trl_comparison.print_table(COMPARISON, result, Console(file=out, width=120))
    assert "losses differ by at most 2.00% at any step" in out.getvalue()
