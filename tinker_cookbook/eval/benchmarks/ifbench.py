"""IFBench: 300 prompts with 344 instructions of 58 types (Pyatkin et al. 2025)."""

from __future__ import annotations

from typing import Any

from tinker_cookbook.eval.benchmarks._common import build_messages
from tinker_cookbook.eval.benchmarks._data import Source
from tinker_cookbook.eval.benchmarks._instructions import InstructionBenchmark
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example, ExampleEnv
from tinker_cookbook.renderers import Renderer


class IFBenchBenchmarkBuilder(InstructionBenchmark):
    """IFBench; the Hub calls the split of its prompts ``train``."""

    name = "ifbench"
    source = Source(
        "allenai/IFBench_test",
        "train",
        folders=("ifbench", "IFBench/data", "IFBench_test"),
        files=("IFBench_test.jsonl",),
    )


class IFBenchEnv(ExampleEnv):
    """One prompt, with the types of its instructions and their arguments."""

    def __init__(
        self,
        prompt: str,
        instruction_ids: list[str],
        kwargs_list: list[dict[str, Any]],
        renderer: Renderer,
        example_id: str = "",
    ) -> None:
        expected = InstructionBenchmark.instructions(instruction_ids, kwargs_list)
        logs = {"input": prompt, **expected}
        example = Example(example_id, build_messages(prompt), expected, gold=None, logs=logs)
        super().__init__(IFBenchBenchmarkBuilder(), example, renderer, BenchmarkConfig(), 0)


register(IFBenchBenchmarkBuilder())
