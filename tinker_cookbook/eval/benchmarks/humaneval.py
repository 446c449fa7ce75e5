"""HumanEval: 164 Python functions to complete from their docstring (Chen et al. 2021)."""

from __future__ import annotations

import re

from tinker_cookbook.eval.benchmarks._code import CodeBenchmark, ProgramTests
from tinker_cookbook.eval.benchmarks._common import build_messages
from tinker_cookbook.eval.benchmarks._data import Source, column
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example

SOURCE = Source(
    "openai/openai_humaneval",
    "test",
    folders=("humaneval", "human-eval/data"),
    files=("HumanEval.jsonl.gz", "HumanEval.jsonl"),
)


class HumanEvalBenchmarkBuilder(CodeBenchmark):
    """HumanEval."""

    name = "humaneval"

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the problems; ``expected`` has the tests and the name of the function."""
        examples: list[Example] = []
        for row in SOURCE.load(config.data_path):
            start = column(row, "prompt", where=self.name)
            entry_point = column(row, "entry_point", where=self.name)
            prompt = (
                f"Complete this Python function:\n\n```python\n{start.rstrip()}\n```\n\n"
                "Answer with a Python code block that contains the complete function and its "
                "imports."
            )
            solution = start + column(row, "canonical_solution", where=self.name)
            examples.append(
                Example(
                    example_id=column(row, "task_id", where=self.name),
                    messages=build_messages(prompt),
                    expected={"entry_point": entry_point, "test": row["test"], "prompt": start},
                    gold=f"```python\n{solution.rstrip()}\n```",
                    logs={"input": start, "entry_point": entry_point},
                )
            )
        return examples

    def program_tests(self, example: Example) -> ProgramTests:
        """Returns one test for each assertion."""
        from tinker_cookbook.sandbox import split_check

        name, start = example.expected["entry_point"], example.expected["prompt"]
        # Imports and helper functions before the function. The tests get a separate copy, which the
        # program cannot change.
        preamble = start[: _start_of(start, name)]
        return ProgramTests(
            tests=tuple(split_check(example.expected["test"], name)),
            entry_points=(name,),
            setup=preamble,
            preamble=preamble,
        )


def _start_of(code: str, name: str) -> int:
    found = re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE)
    return found.start() if found else 0


register(HumanEvalBenchmarkBuilder())
