"""The benchmark on a GPU: its settings, its arithmetic, and a tiny run on the CPU."""

from __future__ import annotations

import pytest
from bench_runs import run_job

from benchmarks.engine import jobs
from benchmarks.engine import runner as engine_runner
from benchmarks.gpu import runner
from benchmarks.gpu.config import Config
from benchmarks.gpu.goals import goal_line

pytest_plugins = ("bench_runs",)


def result_of(gpu: str | None, speed: float | None) -> dict:
    return {
        "model": "shape:qwen3-4b",
        "rank": 16,
        "data": "random:2048-2048",
        "dtype": "bfloat16",
        "gpu": gpu,
        "variants": {
            "engine": {"tokens_per_second": speed, "runs": [{"notes": ["no part was repeated"]}]},
            "trl": {"tokens_per_second": 10_000.0},
        },
        "ratios": {"trl": {"tokens_per_second": {"median": 1.6}}} if speed else None,
    }


def test_summary_names_speeds_ratio_and_goal():
    line = goal_line(result_of("NVIDIA H100 80GB HBM3", 17_600.0))
    assert line == (
        "shape:qwen3-4b: engine 17,600 tok/s; trl 10,000 tok/s; engine / trl 1.60; no part was "
        "repeated; Surogate has published 17,500 tok/s: reached"
    )
    assert goal_line(result_of("NVIDIA H100", 15_000.0)).endswith("17,500 tok/s: missed")
    assert goal_line(result_of("NVIDIA H100", None)).endswith("17,500 tok/s: no figure")
    assert goal_line(result_of(None, 20.0)).endswith("for an H100")
    other = result_of("NVIDIA H100", 20_000.0) | {"rank": 32}
    assert goal_line(other).endswith("for rank=16 row_tokens=2048 dtype=bfloat16")


@pytest.mark.slow  # 10 s
def test_tiny_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(jobs, "run_job", run_job)
    monkeypatch.setattr(engine_runner, "run_job", run_job)
    config = Config(
        models=("shape:tiny",), row_tokens=40, batch_size=2, steps=1, repeats=1, rank=4,
        variants=("engine", "plain"), dtype="float32", device="cpu",
        output=str(tmp_path / "out.json"),
    )  # fmt: skip
    assert runner.run_benchmark(config) == 0
    printed = capsys.readouterr().out
    assert "shape:tiny: engine" in printed
    assert "engine / plain" in printed
    assert "padded; no part was repeated" in printed
