"""IFEval: 541 prompts with 834 instructions of 25 types (Zhou et al. 2023)."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._data import Source
from tinker_cookbook.eval.benchmarks._instructions import InstructionBenchmark
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)


class IFEvalBenchmarkBuilder(InstructionBenchmark):
    """IFEval; the Hub calls the split of its prompts ``train``."""

    name = "ifeval"
    source = Source(
        "google/IFEval",
        "train",
        folders=("ifeval", "IFEval"),
        files=("input_data.jsonl", "ifeval_input_data.jsonl"),
    )


register(IFEvalBenchmarkBuilder())
