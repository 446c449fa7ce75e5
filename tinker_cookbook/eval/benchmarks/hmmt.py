"""HMMT: the Harvard-MIT Mathematics Tournament of February and November 2025, 30 problems each."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._data import Source
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks.math500 import MATH500BenchmarkBuilder


class HMMTBenchmarkBuilder(MATH500BenchmarkBuilder):
    """One competition. The answers are expressions, graded as those of MATH-500."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = Source(
            f"MathArena/{name}",
            "train",
            folders=("hmmt", name),
            files=(f"*{name.removeprefix('hmmt_')}*.jsonl", "data/*.parquet"),
        )


register(HMMTBenchmarkBuilder("hmmt_feb_2025"))
register(HMMTBenchmarkBuilder("hmmt_nov_2025"))
