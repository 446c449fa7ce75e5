"""IFBench: 300 prompts with 344 instructions of 58 types (Pyatkin et al. 2025)."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._data import Source
from tinker_cookbook.eval.benchmarks._instructions import InstructionBenchmark
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)


class IFBenchBenchmarkBuilder(InstructionBenchmark):
    """IFBench; the Hub calls the split of its prompts ``train``."""

    name = "ifbench"
    source = Source(
        "allenai/IFBench_test",
        "train",
        folders=("ifbench", "IFBench/data", "IFBench_test"),
        files=("IFBench_test.jsonl",),
    )


register(IFBenchBenchmarkBuilder())
