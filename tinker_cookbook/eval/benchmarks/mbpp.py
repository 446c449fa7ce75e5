"""MBPP: short Python functions with three tests each (Austin et al. 2021).

The Hub's sanitized ``test`` split has 257 problems. The original file has 974, of which the ids 11
to 510 are the test split.
"""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._code import CodeBenchmark, ProgramTests
from tinker_cookbook.eval.benchmarks._common import build_messages
from tinker_cookbook.eval.benchmarks._data import Source, column
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

SOURCE = Source(
    "google-research-datasets/mbpp",
    "test",
    folders=("mbpp",),
    files=("sanitized-mbpp.json", "mbpp.jsonl"),
    config="sanitized",
)

_TEST_IDS = range(11, 511)


class MBPPBenchmarkBuilder(CodeBenchmark):
    """MBPP, test split."""

    name = "mbpp"

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the problems; ``expected`` has the tests, the gold answer the program."""
        examples: list[Example] = []
        for row in SOURCE.load(config.data_path):
            task_id = column(row, "task_id", where=self.name)
            if task_id not in _TEST_IDS:
                continue
            text = column(row, "prompt", "text", where=self.name)
            tests = column(row, "test_list", where=self.name)
            # The first test shows the name of the function and its arguments.
            prompt = (
                f"{text}\n\nThe function must pass this test:\n{tests[0]}\n\n"
                "Answer with a Python code block that contains the complete function."
            )
            code = column(row, "code", where=self.name).replace("\r\n", "\n")
            imports = row.get("test_imports") or [row.get("test_setup_code") or ""]
            examples.append(
                Example(
                    example_id=f"{self.name}_{task_id}",
                    messages=build_messages(prompt),
                    expected={"imports": list(imports), "tests": list(tests), "code": code},
                    gold=f"```python\n{code}\n```",
                    logs={"input": text, "tests": list(tests)},
                )
            )
        return examples

    def program_tests(self, example: Example) -> ProgramTests:
        """Returns the three tests and the names of the gold program that they use."""
        from tinker_cookbook.sandbox import names_in_tests

        code, tests = example.expected["code"], tuple(example.expected["tests"])
        setup = "\n".join(example.expected["imports"]).replace("\r\n", "\n")
        if names_in_tests(code, [setup]):
            # Problem 367 builds trees of the program's class, so that code must run with the tests.
            tests, setup = tuple(f"{setup}\n{test}" for test in tests), ""
        return ProgramTests(tests, tuple(names_in_tests(code, tests)), setup)


register(MBPPBenchmarkBuilder())
