"""The comparison of a step of direct preference optimisation."""

from __future__ import annotations

from tinker_cookbook.engine.bench.beside_trl import Comparison, run_comparison
from tinker_cookbook.preference.bench import report
from tinker_cookbook.preference.bench.config import Config

_ROOM = "tinker_cookbook.preference.bench"
COMPARISON = Comparison(
    modules={"ours": f"{_ROOM}.ours", "trl": f"{_ROOM}.trl_side"},
    build=report.build,
    one_line=report.one_line,
    print_table=report.print_table,
)


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status."""
    from recipes.preference.dpo.train import dpo_learning_rate

    config.check()
    rate = config.learning_rate
    return run_comparison(
        config, COMPARISON, dpo_learning_rate(config.model_name) if rate is None else rate
    )
