"""Programs as answers: HumanEval and MBPP, graded by tests in the local sandbox.

HumanEval (Chen et al. 2021) has 164 Python functions to complete from their docstring. MBPP
(Austin et al. 2021) has short functions with three tests each: the Hub's sanitized ``test`` split
has 257, the original file 974, of which the ids 11 to 510 are the test split.
"""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tinker_cookbook import sandbox
from tinker_cookbook.eval.benchmarks.data import Row, RowBenchmark, Source, build_messages, column
from tinker_cookbook.eval.benchmarks.registry import register
from tinker_cookbook.eval.run.examples import Example, Grade
from tinker_cookbook.eval.run.types import BenchmarkConfig
from tinker_cookbook.sandbox.program_text import extract_program, with_preamble
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

# The slowest reference solution (mbpp_123) computes for 5 s on a laptop.
_TEST_SECONDS = 20.0
_MBPP_TEST_IDS = range(11, 511)


@dataclass(frozen=True)
class ProgramTests:
    """Tests of an example's program."""

    tests: tuple[str, ...]
    """Python code of each test, which raises if the program is wrong."""
    entry_points: tuple[str, ...]
    """Functions and classes that the program must define; the tests use them."""
    setup: str = ""
    """Code that runs before the tests, in the tests' process."""
    preamble: str = ""
    """Code that runs before the program, such as the imports in the prompt."""


class CodeBenchmark(RowBenchmark):
    """Benchmark with programs as answers. An answer is right if it passes all tests.

    Programs run in ``tinker_cookbook.sandbox`` (docs/sandbox.md); their tests run in another
    process, so that no program can see or change a verdict. A call may compute for 20 s. A
    sandbox failure is an error of the answer, not a score of 0.
    """

    requires_sandbox = True
    grader_version = "4"

    @abstractmethod
    def program_tests(self, example: Example) -> ProgramTests:
        """Returns the tests of an example."""

    async def grade_async(self, response: str, example: Example, config: BenchmarkConfig) -> Grade:
        """Grades in a warm sandbox, without a thread."""
        program, tests, more = self._job(response, example)
        return _grade_of(await _grader().grade(program, tests, **more))

    def grade(self, response: str, example: Example) -> Grade:
        """Synchronous version of ``grade_async``; blocks the calling thread.

        Raises:
            SandboxUnavailableError: this machine cannot isolate programs.
            SandboxInfrastructureError: the program could not be graded.
        """
        program, tests, more = self._job(response, example)
        return _grade_of(_grader().grade_sync(program, tests, **more))

    def _job(self, response: str, example: Example) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        tests = self.program_tests(example)
        more = {"setup": tests.setup, "entry_points": tests.entry_points}
        return program_of(response, tests), tests.tests, more


@functools.cache
def _grader() -> sandbox.PythonGrader:
    return sandbox.PythonGrader(test_seconds=_TEST_SECONDS)


def program_of(response: str, tests: ProgramTests) -> str:
    """Returns the program in a response; a response without a code block is treated as code."""
    code = extract_program(response, tests.entry_points)
    return with_preamble(tests.preamble, response if code is None else code)


def _grade_of(graded: sandbox.Grade) -> Grade:
    # Report the first failure: later tests often fail for the same reason.
    messages = [test.message for test in graded.tests if not test.passed]
    error = graded.program_error or (messages[0] if messages else "")
    return Grade(
        float(graded.passed),
        {"tests_passed": graded.score, "program_seconds": graded.metrics["seconds"]},
        {"program_error": error} if error else {},
    )


class HumanEvalBenchmarkBuilder(CodeBenchmark):
    """HumanEval."""

    name = "humaneval"
    source = Source(
        "openai/openai_humaneval",
        "test",
        folders=("humaneval", "human-eval/data"),
        files=("HumanEval.jsonl.gz", "HumanEval.jsonl"),
    )

    def example(self, row: Row) -> Example:
        """Returns a problem; ``expected`` has the tests and the name of the function."""
        start = column(row, "prompt", where=self.name)
        entry_point = column(row, "entry_point", where=self.name)
        prompt = (
            f"Complete this Python function:\n\n```python\n{start.rstrip()}\n```\n\n"
            "Answer with a Python code block that contains the complete function and its "
            "imports."
        )
        solution = start + column(row, "canonical_solution", where=self.name)
        return Example(
            example_id=column(row, "task_id", where=self.name),
            messages=build_messages(prompt),
            expected={"entry_point": entry_point, "test": row["test"], "prompt": start},
            gold=f"```python\n{solution.rstrip()}\n```",
            logs={"input": start, "entry_point": entry_point},
        )

    def program_tests(self, example: Example) -> ProgramTests:
        """Returns one test for each assertion."""
        name, start = example.expected["entry_point"], example.expected["prompt"]
        # Imports and helper functions before the function. The tests get a separate copy, which the
        # program cannot change.
        found = re.search(rf"^def {re.escape(name)}\b", start, re.MULTILINE)
        preamble = start[: found.start()] if found else ""
        return ProgramTests(
            tests=tuple(sandbox.split_check(example.expected["test"], name)),
            entry_points=(name,),
            setup=preamble,
            preamble=preamble,
        )


class MBPPBenchmarkBuilder(CodeBenchmark):
    """MBPP, test split."""

    name = "mbpp"
    source = Source(
        "google-research-datasets/mbpp",
        "test",
        folders=("mbpp",),
        files=("sanitized-mbpp.json", "mbpp.jsonl"),
        config="sanitized",
    )

    def rows(self, config: BenchmarkConfig) -> Iterable[Row]:
        """Returns the rows of the test split."""
        rows = super().rows(config)
        return [r for r in rows if column(r, "task_id", where=self.name) in _MBPP_TEST_IDS]

    def example(self, row: Row) -> Example:
        """Returns a problem; ``expected`` has the tests, the gold answer the program."""
        text = column(row, "prompt", "text", where=self.name)
        tests = column(row, "test_list", where=self.name)
        # The first test shows the name of the function and its arguments.
        prompt = (
            f"{text}\n\nThe function must pass this test:\n{tests[0]}\n\n"
            "Answer with a Python code block that contains the complete function."
        )
        code = column(row, "code", where=self.name).replace("\r\n", "\n")
        imports = row.get("test_imports") or [row.get("test_setup_code") or ""]
        return Example(
            example_id=f"{self.name}_{row['task_id']}",
            messages=build_messages(prompt),
            expected={"imports": list(imports), "tests": list(tests), "code": code},
            gold=f"```python\n{code}\n```",
            logs={"input": text, "tests": list(tests)},
        )

    def program_tests(self, example: Example) -> ProgramTests:
        """Returns the three tests and the names of the gold program that they use."""
        code, tests = example.expected["code"], tuple(example.expected["tests"])
        setup = "\n".join(example.expected["imports"]).replace("\r\n", "\n")
        if sandbox.names_in_tests(code, [setup]):
            # Problem 367 builds trees of the program's class, so that code must run with the tests.
            tests, setup = tuple(f"{setup}\n{test}" for test in tests), ""
        return ProgramTests(tests, tuple(sandbox.names_in_tests(code, tests)), setup)


register(HumanEvalBenchmarkBuilder())
register(MBPPBenchmarkBuilder())
