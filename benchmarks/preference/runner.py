"""The comparison of a step of direct preference optimisation."""

from __future__ import annotations

from benchmarks.engine.beside_trl import Comparison, run_comparison
from benchmarks.preference import report
from benchmarks.preference.config import Config
from benchmarks.preference.trl_side import read_pairs
from tinker_cookbook.recipes.preference.dpo.train import dpo_learning_rate

_ROOM = "benchmarks.preference"
COMPARISON = Comparison(
    modules={"ours": f"{_ROOM}.ours", "trl": f"{_ROOM}.trl_side"},
    build=report.build,
    learned=report.learned,
    print_table=report.print_table,
    learning_rate=dpo_learning_rate,
    check=read_pairs,
)


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status."""
    return run_comparison(config, COMPARISON)
