"""Grades Python programs that a model wrote, by tests that the program cannot see or deceive.

    from tinker_cookbook.sandbox import PythonGrader

    async with PythonGrader() as grader:
        grade = await grader.grade("def add(a, b): return a + b", ["assert add(1, 2) == 3"])
        reward = grade.score  # share of tests passed

The program runs in one sandboxed process, its tests in another. A test that calls a function of the
program sends the arguments to the program's process and receives a plain value. The expected result
and the verdict stay in the process of the tests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.sandbox.grading_runs import (
    GraderSettings,
    JobResult,
    ProgramRun,
    run_calls,
    run_program,
    run_stdio,
)
from tinker_cookbook.sandbox.grading_worker import WorkerPool
from tinker_cookbook.sandbox.inside import values
from tinker_cookbook.sandbox.launch import SandboxProcess, SandboxTier
from tinker_cookbook.sandbox.program_text import parse_program

_WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class CallTest:
    """Calls a function of the program, or a method of its class ``Solution``, and compares the
    result.

    Tuples and lists compare as equal, since data sets store expected results as JSON.
    """

    function: str
    arguments: Sequence[Any]
    expected: Any


@dataclass(frozen=True)
class StdioTest:
    """Runs the whole program with a text as input and compares its output."""

    stdin: str
    stdout: str


Test = str | CallTest | StdioTest
"""A text is Python code, such as ``assert add(1, 2) == 3``, that raises if the program is wrong."""


@dataclass(frozen=True)
class GradedTest:
    """The result of one test."""

    passed: bool
    message: str = ""
    """Why the test failed. May quote the program's result or exception, never the expected
    result."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Grade:
    """The results of all tests, in their order."""

    tests: tuple[GradedTest, ...]
    program_error: str = ""
    """Why the program as a whole failed: it does not compile, ended early, exceeded a limit."""
    metrics: dict[str, float] = field(default_factory=dict)
    """``seconds``, ``cpu_seconds`` and ``memory_bytes`` of the program."""

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return all(test.passed for test in self.tests)

    @property
    def score(self) -> float:
        """Share of tests that passed."""
        return sum(test.passed for test in self.tests) / len(self.tests)


class PythonGrader:
    """Grades programs in sandboxes that are kept warm; usable from threads and any event loop.

    The sandboxes start with the first program. They end with ``close`` or with this process.

    Args:
        settings: Limits and number of workers.
        **changes: Fields of ``GraderSettings`` that differ from ``settings``.
    """

    def __init__(self, settings: GraderSettings | None = None, **changes: Any) -> None:
        try:
            self.settings = replace(settings or GraderSettings(), **changes)
        except TypeError as error:  # names the field
            raise ConfigurationError(f"PythonGrader: {error}") from error
        self._pool = WorkerPool(self.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the settings only: a copy in another process starts its own sandboxes."""
        return PythonGrader, (self.settings,)

    @property
    def tier(self) -> SandboxTier:
        """How programs are isolated."""
        return self._pool.tier

    async def grade(
        self,
        program: str,
        tests: Sequence[Test],
        *,
        setup: str = "",
        entry_points: Sequence[str] | None = None,
        stop_at_failure: bool = False,
        total_seconds: float | None = None,
    ) -> Grade:
        """Runs the tests against a program.

        Args:
            program: Python code.
            tests: Texts, ``CallTest`` and ``StdioTest``, also mixed. Tests of one program share
                one process and its state. Each ``StdioTest`` runs the program again.
            setup: Code that runs before the tests, in the tests' process: helper functions that the
                tests use. The program cannot replace them.
            entry_points: Names in the tests that refer to the program, even if the tests define
                them; see ``names_in_tests``. Default: each name that a test uses and that neither
                the test, ``setup``, Python nor its standard library defines.
            stop_at_failure: Whether the tests after the first failure are skipped and count as
                failed. For rewards that require all tests to pass.
            total_seconds: Time limit of all tests. Default: that of the settings.

        Raises:
            DataValidationError: There are no tests, or they or ``setup`` do not compile, or
                ``setup`` fails, or a test passes a value that cannot be sent to the program.
            SandboxInfrastructureError: The program could not be graded. Do not turn this into a
                reward of 0.
            SandboxUnavailableError: This machine cannot isolate programs.
        """
        futures, order = self._submit(
            program, tests, setup, entry_points, stop_at_failure, total_seconds
        )
        return _assemble(await asyncio.gather(*map(asyncio.wrap_future, futures)), order)

    def grade_sync(self, program: str, tests: Sequence[Test], **options: Any) -> Grade:
        """Synchronous version of ``grade``, with the same options; blocks the calling thread."""
        futures, order = self._submit(program, tests, **options)
        return _assemble([future.result() for future in futures], order)

    async def run(self, program: str, stdin: str = "") -> ProgramRun:
        """Runs a program without grading it, as for a ``python`` tool.

        Raises:
            SandboxInfrastructureError: The program could not be run.
        """

        def job(inside: SandboxProcess, settings: GraderSettings) -> JobResult:
            return JobResult(
                [], run_program(inside, settings, program, stdin, settings.output_bytes)
            )

        return (await asyncio.wrap_future(self._pool.submit(job))).run

    def _submit(
        self,
        program: str,
        tests: Sequence[Test],
        setup: str = "",
        entry_points: Sequence[str] | None = None,
        stop_at_failure: bool = False,
        total_seconds: float | None = None,
    ) -> tuple[list[Future[JobResult]], list[list[int]]]:
        """Returns the futures of the jobs, and which tests each job has."""
        _check_tests(tests, setup)
        ends = {
            "total_seconds": self.settings.total_seconds
            if total_seconds is None
            else total_seconds,
            "stop_at_failure": stop_at_failure,
        }
        called = [i for i, test in enumerate(tests) if not isinstance(test, StdioTest)]
        futures, order = [], []
        if called:
            encoded = [_encode_test(tests[i]) for i in called]
            names = None if entry_points is None else list(entry_points)
            calls = {"tests": encoded, "setup": setup, "entry_points": names, **ends}
            futures.append(self._pool.submit(partial(run_calls, program=program, **calls)))
            order.append(called)
        cases = {i: (t.stdin, t.stdout) for i, t in enumerate(tests) if isinstance(t, StdioTest)}
        if cases:
            stdio = {"cases": list(cases.values()), "same": same_output, **ends}
            futures.append(self._pool.submit(partial(run_stdio, program=program, **stdio)))
            order.append(list(cases))
        return futures, order

    def close(self) -> None:
        """Ends the sandboxes. Programs that are being graded fail with an error."""
        self._pool.close()

    async def __aenter__(self) -> PythonGrader:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> PythonGrader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_tests(tests: Sequence[Test], setup: str) -> None:
    if not tests:
        raise DataValidationError("tests: none given; a program without tests has no score")
    codes = [("setup", setup)]
    codes += [(f"tests[{i}]", test) for i, test in enumerate(tests) if isinstance(test, str)]
    for name, code in codes:
        try:
            parse_program(code)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise DataValidationError(f"{name}: does not compile: {error}") from None


def _encode_test(test: Test) -> dict[str, Any]:
    if isinstance(test, str):
        return {"code": test}
    assert isinstance(test, CallTest)

    def refuse(value: Any) -> Any:
        raise DataValidationError(
            f"CallTest of {test.function}: {type(value).__name__} is not a plain value; write the "
            "test as code instead"
        )

    return {
        "function": test.function,
        "arguments": values.encode(list(test.arguments), refuse),
        "expected": values.encode(test.expected, refuse),
    }


def _assemble(parts: Sequence[Any], order: list[list[int]]) -> Grade:
    graded: dict[int, GradedTest] = {}
    for part, indices in zip(parts, order, strict=True):
        for index, (message, seconds) in zip(indices, part.tests, strict=True):
            graded[index] = GradedTest(not message, message, seconds)
    metrics = {
        "seconds": sum(part.run.seconds for part in parts),
        "cpu_seconds": sum(part.run.cpu_seconds for part in parts),
        "memory_bytes": float(max(part.run.memory_bytes for part in parts)),
    }
    errors = [part.program_error for part in parts if part.program_error]
    tests = tuple(graded[index] for index in sorted(graded))
    return Grade(tests, errors[0] if errors else "", metrics)


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs agree, line by line, up to white space at the ends of lines.

    Lines that differ as text agree if they have equally many words and each pair is the same text
    or the same number: whole numbers in every digit, others (``1.50`` and ``1.5``) up to an
    absolute or relative difference of 1e-6.
    """
    ours, theirs = (text.rstrip().split("\n") for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        a.strip() == b.strip() or _same_words(a.split(), b.split())
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_words(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def _same_numbers(ours: str, theirs: str) -> bool:
    if _WHOLE.fullmatch(ours) and _WHOLE.fullmatch(theirs):
        # As text, since int() refuses more than 4,300 digits.
        return _digits(ours) == _digits(theirs)
    try:
        return "_" not in ours + theirs and values.same_number(_number(ours), _number(theirs))
    except ValueError:
        return False


def _number(word: str) -> float:
    # A whole number stays exact, if it is not longer than what int() takes.
    return int(word) if _WHOLE.fullmatch(word) and len(word) < 4000 else float(word)


def _digits(number: str) -> str:
    """Returns a whole number without leading zeros; only negative ones keep their sign."""
    digits = number.lstrip("+-").lstrip("0")
    return f"-{digits}" if digits and number.startswith("-") else digits


@cache
def default_grader() -> PythonGrader:
    """Returns the grader with default settings that this process shares."""
    return PythonGrader()


def grade_program(program: str, tests: Sequence[Test], **options: Any) -> Grade:
    """Grades one program with ``default_grader``; options as of ``PythonGrader.grade``."""
    return default_grader().grade_sync(program, tests, **options)
