"""Runs the training benchmark for each model and prints what they come to."""

from __future__ import annotations

from rich.console import Console

from benchmarks import report
from benchmarks.engine import report as engine_report
from benchmarks.engine.config import check_config
from benchmarks.engine.runner import measure
from benchmarks.gpu.config import Config
from benchmarks.gpu.goals import goal_line


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns 1 if a model has no figure, 0 else."""
    config.check()
    for model in config.models:
        check_config(config.of(model))
    console = Console(highlight=False)
    results = [measure(config.of(model), console) for model in config.models]
    lines = [goal_line(result) for result in results]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    whole = {"benchmark": "gpu", "date": report.now(), "models": results, "summary": lines}
    report.deliver(whole, config.output, console)
    return max(engine_report.exit_status(result) for result in results)
