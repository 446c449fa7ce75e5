"""IFEval: 541 prompts with 834 instructions of 25 types (Zhou et al. 2023)."""

from __future__ import annotations

from typing import Any

from tinker_cookbook.eval.benchmarks._data import Source
from tinker_cookbook.eval.benchmarks._instructions import InstructionBenchmark
from tinker_cookbook.eval.benchmarks._message_env import ExampleMessageEnv
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.renderers import Message


class IFEvalBenchmarkBuilder(InstructionBenchmark):
    """IFEval; the Hub calls the split of its prompts ``train``."""

    name = "ifeval"
    source = Source(
        "google/IFEval",
        "train",
        folders=("ifeval", "IFEval"),
        files=("input_data.jsonl", "ifeval_input_data.jsonl"),
    )


class IFEvalMessageEnv(ExampleMessageEnv):
    """One prompt, with the types of its instructions and their arguments."""

    def __init__(
        self,
        messages: list[Message],
        instruction_ids: list[str],
        kwargs_list: list[dict[str, Any]],
        example_id: str = "",
    ) -> None:
        expected = InstructionBenchmark.instructions(instruction_ids, kwargs_list)
        super().__init__(IFEvalBenchmarkBuilder(), messages, expected, example_id)


register(IFEvalBenchmarkBuilder())
