"""The comparison of a step of direct preference optimisation."""

from __future__ import annotations

from recipes.preference.dpo.train import dpo_learning_rate
from tinker_cookbook.engine.bench.beside_trl import Comparison, run_comparison
from tinker_cookbook.preference.bench import report
from tinker_cookbook.preference.bench.config import Config
from tinker_cookbook.preference.bench.trl_side import read_pairs

_ROOM = "tinker_cookbook.preference.bench"
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
