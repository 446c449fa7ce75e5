"""Base of MBPP and HumanEval: answers are Python programs, graded in the local sandbox."""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass

from tinker_cookbook import sandbox
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, Grade

# The slowest reference solution (mbpp_123) computes for 5 s on a laptop.
_TEST_SECONDS = 20.0


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


class CodeBenchmark(ExampleBenchmark):
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
        tests = self.program_tests(example)
        graded = await _grader().grade(
            _program(response, tests),
            tests.tests,
            setup=tests.setup,
            entry_points=tests.entry_points,
        )
        return _grade_of(graded)

    def grade(self, response: str, example: Example) -> Grade:
        """Synchronous version of ``grade_async``; blocks the calling thread.

        Raises:
            SandboxUnavailableError: this machine cannot isolate programs.
            SandboxInfrastructureError: the program could not be graded.
        """
        tests = self.program_tests(example)
        graded = _grader().grade_sync(
            _program(response, tests),
            tests.tests,
            setup=tests.setup,
            entry_points=tests.entry_points,
        )
        return _grade_of(graded)


@functools.cache
def _grader() -> sandbox.PythonGrader:
    from tinker_cookbook.sandbox import PythonGrader

    return PythonGrader(test_seconds=_TEST_SECONDS)


def _program(response: str, tests: ProgramTests) -> str:
    """Returns the program in a response; a response without a code block is treated as code."""
    from tinker_cookbook.sandbox.program_text import extract_program, with_preamble

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
