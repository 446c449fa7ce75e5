"""The comparison of a step of RL."""

from __future__ import annotations

from benchmarks.engine.beside_trl import Comparison, run_comparison
from benchmarks.rl import report
from benchmarks.rl.config import Config
from tinker_cookbook.rl.settings import rl_learning_rate

_ROOM = "benchmarks.rl"
COMPARISON = Comparison(
    modules={"ours": f"{_ROOM}.ours", "trl": f"{_ROOM}.trl_side"},
    build=report.build,
    learned=report.learned,
    print_table=report.print_table,
    learning_rate=rl_learning_rate,
)


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status."""
    return run_comparison(config, COMPARISON)
