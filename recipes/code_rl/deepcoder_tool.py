"""A programming task, the tool that runs a solution, and the reward of the final answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from tinker_cookbook.recipes.code_rl.code_grading import (
    describe,
    extract_code_from_model,
    grade_solution,
)
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.sandbox import Grade, SandboxBackend
from tinker_cookbook.tool_use import ToolResult, simple_tool_result, tool
from tinker_cookbook.utils import logtree


@dataclass(frozen=True)
class DeepcoderTask:
    """A problem and its tests.

    Attributes:
        problem: Text of the user message.
        tests: Tests of the final answer; see ``code_grading``.
        starter_code: Code to complete.
        preamble: Code before the program only, such as imports that the starter code presupposes.
        public_tests: Tests that the tool runs. By default those whose input and output are both
            in the problem's text: the model has seen them.
        entry_points: Names in the tests that refer to the program; see ``code_grading``.
    """

    problem: str
    tests: list[dict[str, Any]]
    starter_code: str | None = None
    public_tests: tuple[dict[str, Any], ...] | None = None
    entry_points: tuple[str, ...] | None = None
    preamble: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Functions of a solution that the tests call, as far as they are known."""
        called = ((test.get("metadata") or {}).get("func_name") for test in self.tests)
        return tuple({str(name) for name in (*called, *(self.entry_points or ())) if name})

    async def grade(
        self,
        tests: list[dict[str, Any]],
        code: str,
        timeout: float,
        backend: SandboxBackend | None,
    ) -> Grade:
        """Runs some of its tests against a solution; see ``code_grading.grade_solution``."""
        return await grade_solution(
            tests,
            code,
            timeout,
            backend,
            preamble=self.preamble,
            entry_points=self.entry_points,
        )

    def visible_tests(self) -> list[dict[str, Any]]:
        """Returns the public tests; there may be none."""
        if self.public_tests is not None:
            return list(self.public_tests)
        return [test for test in self.tests if self._shows(test)]

    def _shows(self, test: dict[str, Any]) -> bool:
        given, expected = str(test["input"]).strip(), str(test["output"]).strip()
        return bool(given) and given in self.problem and expected in self.problem


class DeepcoderTool:
    """The tool ``check_solution`` of a task. It runs public tests only.

    With the hidden tests it would tell the model, try by try, what the reward wants.
    """

    def __init__(
        self,
        task: DeepcoderTask,
        sandbox_backend: SandboxBackend | None = None,
        timeout: int = 6,
    ) -> None:
        self._task, self._backend, self._timeout = task, sandbox_backend, timeout

    # The grader has its own limits. A limit here would count the wait for a free worker.
    @tool(timeout_seconds=None)
    async def check_solution(
        self,
        code: Annotated[str, "Python code implementing the solution."],
    ) -> ToolResult:
        """Runs a solution on the example tests of the problem, before the final answer."""
        tests = self._task.visible_tests()
        if not tests:
            return simple_tool_result(json.dumps({"message": "This problem has no example tests."}))
        grade = await self._task.grade(tests, code, self._timeout, self._backend)
        return simple_tool_result(
            json.dumps({"passed": grade.passed, "details": describe(grade)}, ensure_ascii=False),
            metrics={"passed": float(grade.passed)},
        )


@dataclass
class DeepcoderReward:
    """Reward of an episode: ``format_coef * (has_code_block - 1) + correct``.

    ``correct`` is 1 if all tests pass, else 0, or the share of tests passed with
    ``partial_credit``. The metrics are ``format``, ``correct`` and ``tests_passed``. A sandbox that
    fails raises an error: it is not a reward of 0.
    """

    task: DeepcoderTask
    sandbox_backend: SandboxBackend | None = None
    timeout: int = 6
    format_coef: float = 0.1
    partial_credit: bool = False
    code_block: bool = True
    """Whether the code must be in a fenced block. Else an answer without one is all code."""

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        """Grades the last answer of the conversation."""
        answers = [message for message in history if message["role"] == "assistant"]
        content = get_text_content(answers[-1]) if answers else ""
        code = extract_code_from_model(content, self.task.names)
        if code is None and not self.code_block:
            code = content
        has_block = float(code is not None)
        correct = share = 0.0
        if code is not None:
            grade = await self.task.grade(self.task.tests, code, self.timeout, self.sandbox_backend)
            share, correct = grade.score, float(grade.passed)
            if grade.program_error:
                logtree.log_text(f"Program: {grade.program_error}")
        earned = share if self.partial_credit else correct
        reward = self.format_coef * (has_block - 1.0) + earned
        logtree.log_text(
            f"Code block: {bool(has_block)}, tests passed: {share:.0%}, reward: {reward:.2f}"
        )
        return reward, {"format": has_block, "correct": correct, "tests_passed": share}
