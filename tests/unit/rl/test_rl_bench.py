"""The comparison with TRL: our side for real, its side's task, and the report's arithmetic."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import trl_comparison
from benchmarks.harness import run_worker
from benchmarks.rl import comparison, ours, trl_side
from benchmarks.rl.config import Config
from tinker_cookbook.exceptions import ConfigurationError

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


def test_a_side_that_breaks_says_so(job: dict, tmp_path: Path) -> None:
    found = _worked(ours.run, {**job, "renderer_name": "role_colom"}, tmp_path)
    assert found["status"] == "failed"
    assert "did you mean 'role_colon'" in found["error"]


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


def test_rows_of_evaluations_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step = {"env/all/reward/total": 0.5, "time/total": 2.0, "time/sampling": 1.5, "time/train": 0.4}
    rows = [{"step": 0, "test/env/all/reward/total": 0.1}, step, step | {"time/total": 3.0}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = ours.read_metrics(path)
    assert found["seconds"] == [2.0, 3.0]
    assert found["parts"] == {"sampling": [1.5, 1.5], "training": [0.4, 0.4]}


def test_without_trl_there_is_a_line(tmp_path: Path, monkeypatch, capsys) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert not trl_comparison.has_trl(str(python))
    monkeypatch.setattr(trl_comparison, "run_side", lambda *_: _run([9.0, 1.0, 2.0, 3.0]))
    config = Config(device="cpu", trl_python=str(python), learning_rate=1e-4)
    assert comparison.run_benchmark(config) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["ratio"] is None
    assert list(result["variants"]) == ["ours"]
    assert printed.count("TRL is not compared") == 3  # at once, below the table, in the object
    assert (result["device"], result["learning_rate"]) == ("cpu", 1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 1}, "steps: got 1"),
        ({"group_size": 1}, "group_size: got 1"),
        ({"variants": ("tlr",)}, "did you mean 'trl'?"),
        ({"trl_batch_size": 7}, "trl_batch_size: got 7"),
        ({"trl_python": "/no/such/python"}, "trl_python: /no/such/python is no program"),
        ({"output": "/no/such/folder/x.json"}, "output: the folder of"),
    ],
)
def test_settings_are_checked_first(settings: dict, words: str) -> None:
    Config(trl_python=sys.executable).check()
    with pytest.raises(ConfigurationError) as caught:
        Config(**settings).check()
    assert words in str(caught.value)


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


def test_repeats_have_successive_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[str, int]] = []

    def run_side(_: str, module: str, job: dict, __: Path) -> dict:
        seeds.append((module.rpartition(".")[2], job["seed"]))
        return _run([1.0] * 4)

    monkeypatch.setattr(trl_comparison, "has_trl", lambda _: True)
    monkeypatch.setattr(trl_comparison, "run_side", run_side)
    config = Config(device="cpu", learning_rate=1e-4, steps=4, repeats=2, seed=5)
    assert comparison.run_benchmark(config) == 0
    assert seeds == [("ours", 5), ("trl_side", 5), ("ours", 6), ("trl_side", 6)]


def test_one_side_lost() -> None:
    killed = {"status": "killed", "error": "most likely out of memory"}
    result = _build([_run([1.0, 1.0])], [killed])
    assert result["ratio"] is None
    assert trl_comparison.exit_status(result) == 0
    broken = {"status": "failed", "error": "KeyError: 'x'"}
    assert trl_comparison.exit_status(_build([_run([1.0, 1.0])], [broken])) == 1
    assert trl_comparison.exit_status(_build([killed], [killed])) == 1
