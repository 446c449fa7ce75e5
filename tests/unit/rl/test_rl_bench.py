"""The comparison with TRL: our side for real, its side's task, and the report's arithmetic."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import trl_comparison
from benchmarks.harness import run_worker
from benchmarks.rl import comparison, ours, trl_side

HAS_TRL = importlib.util.find_spec("trl") is not None


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


@pytest.mark.skipif(not HAS_TRL, reason="trl is not installed")
def test_trl_side_runs_the_same_steps(job: dict, tmp_path: Path) -> None:
    found = _worked(trl_side.run, job, tmp_path)
    assert found["status"] == "ok", found
    assert len(found["seconds"]) == len(found["rewards"]) == 2
    assert found["notes"] == [  # this tokenizer puts a space before "User"
        "TRL's tokenizer reads the prompts as other tokens than ours",
        "23,120 trained parameters",
    ]


def test_trl_gets_our_problems_and_rewards(job: dict) -> None:
    problems, config = trl_side.read_problems(job)
    assert config.learning_rate == 1e-3
    assert len(problems.prompts) == 2 * 3
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    tokenizer = get_tokenizer(job["model_name"])
    texts = [trl_side.prompt_text(tokenizer, prompt) for prompt in problems.prompts]
    assert all("User: What is" in text for text in texts)
    words = texts[4].partition("What is ")[2].partition("?")[0].split()
    total = int(words[0]) + int(words[2])

    def tokens(answer: str) -> list[int]:
        return tokenizer(answer, add_special_tokens=False)["input_ids"]

    answers = [tokens(f" {total}\n\nUser:"), tokens(f" {total}"), tokens(" dog")]
    assert problems.rewards([4, 4, 4], answers) == pytest.approx([1.0, 0.9, -0.1])


def _run(seconds: list[float], **changes: object) -> dict:
    run = {
        "status": "ok",
        "seconds": seconds,
        "rewards": [0.1, 0.2, 0.3, 0.4],
        "parts": {"sampling": [value / 2 for value in seconds]},
        "peak_bytes": 1 << 30,
        "notes": [],
    }
    return run | changes


def _build(our_runs: list[dict], trl: list[dict]) -> dict:
    names = ("groups_per_batch", "group_size", "max_tokens")
    settings = {"model_name": "m", "dtype": "float32", "steps": 4} | dict.fromkeys(names, 8)
    return trl_comparison.build(
        comparison.COMPARISON, settings, {}, {"ours": our_runs, "trl": trl}, []
    )


def test_the_first_step_is_not_counted() -> None:
    trl = _run([9.0, 8.0, 8.0, 8.0], peak_bytes=4 << 30, parts={})
    result = _build([_run([99.0, 2.0, 1.0, 4.0])], [trl])
    assert result["variants"]["ours"]["step_seconds"] == 2.0
    assert result["variants"]["ours"]["part_seconds"] == {"sampling": 1.0}
    assert result["variants"]["ours"]["first_reward"] == 0.1
    assert result["variants"]["ours"]["last_rewards"] == pytest.approx(0.25)
    assert result["ratio"]["step_seconds"]["median"] == 0.25
    assert result["ratio"]["peak_bytes"]["median"] == 0.25
    assert trl_comparison.exit_status(result) == 0
    out = io.StringIO()
    trl_comparison.print_table(comparison.COMPARISON, result, Console(file=out, width=120))
    assert "ours / TRL: 0.25 (0.25) x the time of a step" in out.getvalue()


def test_rewards_are_compared_in_pairs() -> None:
    trl = [_run([1.0] * 4, rewards=[0.1, 0.2, 0.3, 0.4 + shift]) for shift in (0, 0.1, 0.2)]
    better = [_run([1.0] * 4, rewards=[0.2, 0.2, 0.3, 0.5 + shift]) for shift in (0, 0.1)]
    result = _build([*better, {"status": "killed", "error": "no memory"}], trl)
    found = result["reward_differences"]
    assert {part: one["seeds"] for part, one in found.items()} == dict.fromkeys(found, 2)
    assert [one["mean"] for one in found.values()] == pytest.approx([0.1, 0.05, 0.05])
    # Both seeds agree on the difference, whatever their rewards are.
    assert [one["standard_error"] for one in found.values()] == pytest.approx([0, 0, 0])
    out = io.StringIO()
    trl_comparison.print_table(comparison.COMPARISON, result, Console(file=out, width=120))
    assert "ours - TRL, over 2 seeds: first step +0.100 (standard error 0.000)" in out.getvalue()
    assert _build(better[:1], trl[:1])["reward_differences"] is None
