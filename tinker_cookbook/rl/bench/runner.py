"""The comparison of a step of RL."""

from __future__ import annotations

from tinker_cookbook.engine.bench.beside_trl import Comparison, run_comparison
from tinker_cookbook.rl.bench import report
from tinker_cookbook.rl.bench.config import Config

COMPARISON = Comparison(
    modules={"ours": "tinker_cookbook.rl.bench.ours", "trl": "tinker_cookbook.rl.bench.trl_side"},
    build=report.build,
    one_line=report.one_line,
    print_table=report.print_table,
)


def run_benchmark(config: Config) -> int:
    """Measures and prints; returns the exit status."""
    from recipes.rl_settings import rl_learning_rate

    config.check()
    rate = config.learning_rate
    return run_comparison(
        config, COMPARISON, rl_learning_rate(config.model_name) if rate is None else rate
    )
