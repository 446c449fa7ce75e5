"""The benchmark of images: a real run of tiny size."""

from __future__ import annotations

from bench_runs import IN_PROCESS

from benchmarks.engine.config import VisionConfig
from benchmarks.engine.vision import runner

pytest_plugins = ("bench_runs",)


def test_tiny_run(in_process_bench) -> None:
    sizes = {"rows": 3, "samples": 2, "prompt_tokens": 8, "answer_tokens": 8, "image_side": 48}
    config = VisionConfig(**{**IN_PROCESS, "model": "shape:tiny-vl"}, **sizes)
    result, printed = in_process_bench(runner, config)
    assert result["loss_difference"] < 1e-5
    for variant in result["variants"].values():
        assert all(seconds > 0 for seconds in variant["seconds"].values())
    assert result["speed"].keys() == result["variants"]["engine"]["seconds"].keys()
    assert "a group computes its prompt" in printed
