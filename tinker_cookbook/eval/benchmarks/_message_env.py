"""Questions of benchmarks as environments of messages, one class for each benchmark."""

from __future__ import annotations

from typing import Any

from tinker_cookbook.eval.benchmarks._common import build_messages
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, grade_response
from tinker_cookbook.grading.texts import split_thinking
from tinker_cookbook.renderers import Message, get_text_content
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
