"""Questions of benchmarks as environments, one class for each (``eval.benchmarks``)."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from functools import partial
from typing import Any

from tinker_cookbook.eval.benchmarks.choices import (
    CEvalBenchmarkBuilder,
    GPQABenchmarkBuilder,
    MMLUProBenchmarkBuilder,
    MMLUReduxBenchmarkBuilder,
    SuperGPQABenchmarkBuilder,
)
from tinker_cookbook.eval.benchmarks.data import build_messages
from tinker_cookbook.eval.benchmarks.instructions import (
    IFBenchBenchmarkBuilder,
    IFEvalBenchmarkBuilder,
    InstructionBenchmark,
)
from tinker_cookbook.eval.benchmarks.mathematics import (
    AIMEBenchmarkBuilder,
    GSM8KBenchmarkBuilder,
    MATH500BenchmarkBuilder,
)
from tinker_cookbook.eval.benchmarks.programs import MBPPBenchmarkBuilder
from tinker_cookbook.eval.run.examples import (
    Example,
    ExampleBenchmark,
    ExampleEnv,
    grade_response,
)
from tinker_cookbook.eval.run.types import BenchmarkConfig
from tinker_cookbook.grading.texts import split_thinking
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.message_env import MessageEnv, MessageStepResult


class ExampleMessageEnv(MessageEnv):
    """One question as an environment of messages with the grader's reward.

    Args:
        benchmark: Grades the answer.
        question: The prompt.
        expected: Reference for the grader.
        example_id: Name of the example.
        system_prompt: ``None``: that of the benchmark.
        logs: Further entries of the example's logs.
    """

    def __init__(
        self,
        benchmark: ExampleBenchmark,
        question: str | list[Message],
        expected: Any,
        example_id: str = "",
        system_prompt: str | None = None,
        **logs: Any,
    ) -> None:
        messages = build_messages(question) if isinstance(question, str) else question
        text = get_text_content(messages[-1]) if messages else ""
        logs = {"input": text, "expected": expected, **logs}
        self.benchmark, self.expected, self.example_id = benchmark, expected, example_id
        self.example = Example(example_id, messages, expected, gold=None, logs=logs)
        self._config = BenchmarkConfig(system_prompt=system_prompt)

    async def initial_observation(self) -> list[Message]:
        """Returns the prompt's messages."""
        return self.benchmark.prompt_messages(self.example, self._config)

    async def step(self, message: Message) -> MessageStepResult:
        """Grades the answer and ends the episode."""
        text, _ = split_thinking(get_text_content(message))
        grade = await grade_response(self.benchmark, text, self.example, self._config)
        return MessageStepResult(
            grade.reward,
            episode_done=True,
            next_messages=[],
            metrics={**grade.metrics, "correct": float(grade.reward >= 1)},
            logs={"answer": text, **self.example.logs, **grade.logs},
        )


class MATH500MessageEnv(ExampleMessageEnv):
    """One problem; ``expected`` is LaTeX."""

    _benchmark: Callable[[], ExampleBenchmark] = MATH500BenchmarkBuilder

    def __init__(
        self,
        problem: str,
        expected: Any,
        example_id: str = "",
        system_prompt: str | None = None,
    ) -> None:
        super().__init__(self._benchmark(), problem, expected, example_id, system_prompt)


class AIMEMessageEnv(MATH500MessageEnv):
    """One problem of any year; ``expected`` is an integer."""

    _benchmark = partial(AIMEBenchmarkBuilder, "2025", "aime_2025")


class CEvalMessageEnv(ExampleMessageEnv):
    """One question; ``prompt`` has the choices, and ``expected`` is a letter."""

    _benchmark: Callable[[], ExampleBenchmark] = CEvalBenchmarkBuilder

    def __init__(
        self,
        prompt: str,
        expected: str,
        subject: str = "",
        example_id: str = "",
        system_prompt: str | None = None,
    ) -> None:
        given = prompt, expected, example_id, system_prompt
        super().__init__(self._benchmark(), *given, choices=list("ABCD"), group=subject or None)


class GPQAMessageEnv(ExampleMessageEnv):
    """One question; ``prompt`` has the choices, and ``expected`` is a letter."""

    def __init__(
        self,
        prompt: str,
        expected: str,
        example_id: str = "",
        system_prompt: str | None = None,
    ) -> None:
        given = prompt, expected, example_id, system_prompt
        super().__init__(GPQABenchmarkBuilder(), *given, choices=list("ABCD"))


class GSM8KMessageEnv(ExampleMessageEnv):
    """One problem; ``expected`` is a number."""

    def __init__(
        self,
        question: str,
        expected: str,
        example_id: str = "",
        system_prompt: str | None = None,
    ) -> None:
        super().__init__(GSM8KBenchmarkBuilder(), question, expected, example_id, system_prompt)


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
        super().__init__(IFBenchBenchmarkBuilder(), example, renderer, BenchmarkConfig())


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


class MBPPMessageEnv(ExampleMessageEnv):
    """One problem, with its tests.

    ``sandbox_factory`` is not used: the tests run apart from the program, in the package's sandbox.
    """

    def __init__(
        self,
        prompt: str,
        task_prompt: str,
        test_list: list[str],
        sandbox_factory: Any = None,
        example_id: str = "",
        system_prompt: str | None = None,
    ) -> None:
        nodes = [node for test in test_list for node in ast.walk(ast.parse(test))]
        names = {node.id for node in nodes if isinstance(node, ast.Name)} - {*dir(builtins)}
        # Stands for the program of the data, whose functions the tests call.
        code = "\n".join(f"def {name}(): ..." for name in sorted(names))
        expected = {"imports": [], "tests": list(test_list), "code": code}
        super().__init__(
            MBPPBenchmarkBuilder(), prompt, expected, example_id, system_prompt, task=task_prompt
        )


class MMLUProMessageEnv(ExampleMessageEnv):
    """One question; ``prompt`` has the choices, and ``expected`` is a letter."""

    def __init__(
        self,
        prompt: str,
        expected: str,
        valid_letters: str,
        example_id: str = "",
        system_prompt: str | None = None,
    ) -> None:
        given = prompt, expected, example_id, system_prompt
        super().__init__(MMLUProBenchmarkBuilder(), *given, choices=list(valid_letters))


class MMLUReduxMessageEnv(CEvalMessageEnv):
    """One question; ``prompt`` has the choices, and ``expected`` is a letter."""

    _benchmark = MMLUReduxBenchmarkBuilder


class SuperGPQAMessageEnv(ExampleMessageEnv):
    """One question; ``prompt`` has the choices, and ``expected`` is a letter."""

    def __init__(
        self,
        prompt: str,
        expected: str,
        valid_letters: str = "ABCD",
        discipline: str = "",
        example_id: str = "",
        system_prompt: str | None = None,
    ) -> None:
        given = prompt, expected, example_id, system_prompt
        super().__init__(
            SuperGPQABenchmarkBuilder(),
            *given,
            choices=list(valid_letters),
            group=discipline or None,
        )
