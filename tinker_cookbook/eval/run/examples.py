"""Benchmarks of single questions: a prompt, one answer, a grader.

A subclass of ``ExampleBenchmark`` defines ``load_examples`` and ``grade``. The runner samples all
answers to a problem in one request and grades them outside the event loop. ``make_envs`` returns
the same problems as environments, for reinforcement learning.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.eval.run.types import (
    METRIC_MAX_TOKENS_REACHED,
    BenchmarkBuilder,
    BenchmarkConfig,
    Logs,
    Metrics,
)
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.grading.texts import split_thinking
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import run_in_daemon_thread
from tinker_cookbook.rl.types import Action, ActionExtra, Env, Observation, StepResult


@dataclass(frozen=True)
class Grade:
    """Reward of an answer: 1 is right, 0 is wrong, values between are partly right."""

    reward: float
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    """Shown with the answer, as JSON values. ``extracted`` is the final answer read from
    the response, its vote in maj@k."""


@dataclass(frozen=True)
class Example:
    """One problem."""

    example_id: str
    """Unique in the benchmark, and the same in every run."""
    messages: list[Message]
    """The prompt, without the benchmark's system prompt."""
    expected: Any
    """Reference for the grader."""
    gold: str | None
    """A response that must be graded 1, for ``validate``; ``None``: unknown."""
    logs: Logs = field(default_factory=dict)
    """Stored with each answer, for ``grade_fn`` and readers, as JSON values."""
    choices: tuple[str, ...] = ()
    """Texts that may follow ``context``, for scoring by log-probability."""
    answer_index: int | None = None
    """Index of the right choice."""
    context: str = ""
    """Plain-text prompt that the choices continue, without chat format."""


class ExampleBenchmark(BenchmarkBuilder):
    """Benchmark of single questions."""

    shuffle_seed: int | None = None
    """Seed to shuffle the examples, so that the first ones cover all subjects; ``None``: file
    order."""

    @abstractmethod
    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns all examples in a fixed order, from ``config.data_path`` or from the Hub.

        Runs in a thread. ``examples`` applies ``config.max_examples``.
        """

    @abstractmethod
    def grade(self, response: str, example: Example) -> Grade:
        """Grades a response without its thinking. Runs in a thread, possibly several at once.

        An exception counts as an error of this answer, not as a wrong answer.
        """

    async def grade_async(self, response: str, example: Example, config: BenchmarkConfig) -> Grade:
        """Grades a response; by default ``grade`` in a thread.

        Override this for graders that wait, such as a judge or a sandbox.
        """
        return await run_in_daemon_thread(self.grade, response, example)

    def examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the examples that ``config`` selects.

        Raises:
            DataValidationError: there are no examples, or two have the same id.
        """
        examples = self.load_examples(config)
        repeated = [x for x, n in Counter(e.example_id for e in examples).items() if n > 1]
        if repeated or not examples:
            got = f"example_id {repeated[0]!r} twice" if repeated else "no example"
            raise DataValidationError(f"{self.name}: got {got}, expected examples with unique ids")
        if self.shuffle_seed is not None:
            random.Random(self.shuffle_seed).shuffle(examples)
        return examples[: config.max_examples]

    def prompt_messages(self, example: Example, config: BenchmarkConfig) -> list[Message]:
        """Returns the prompt with its system prompt.

        ``config.system_prompt`` replaces any other; ``""`` removes it. The recommended one is used
        for examples without a system message.
        """
        has_system = bool(example.messages) and example.messages[0]["role"] == "system"
        system = config.system_prompt
        if system is None and not has_system:
            system = self.recommended_system_prompt
        if system is None:
            return list(example.messages)
        rest = example.messages[1:] if has_system else example.messages
        return [*([Message(role="system", content=system)] if system else []), *rest]

    def make_envs(self, renderer: Renderer, config: BenchmarkConfig) -> Sequence[Env]:
        """Returns a single-turn environment for each example."""
        return [ExampleEnv(self, example, renderer, config) for example in self.examples(config)]

    def foreign_answer(self, example: Example, examples: Sequence[Example]) -> str | None:
        """Returns a response that must be graded 0: the gold answer of another example.

        ``None``: there is none. Override this if an answer may be right for several examples.
        """
        start = next(i for i, other in enumerate(examples) if other is example)
        others = (examples[(start + step) % len(examples)] for step in range(1, len(examples)))
        return next(
            (o.gold for o in others if o.gold is not None and o.expected != example.expected), None
        )

    def validate(self, config: BenchmarkConfig | None = None) -> list[str]:
        """Grades each gold answer and another example's; returns a sentence for each wrong
        grade."""
        examples = self.examples(config or BenchmarkConfig())
        wrong = []
        for example in examples:
            answers = ((example.gold, 1), (self.foreign_answer(example, examples), 0))
            for answer, expected in answers:
                reward = expected if answer is None else self.grade(answer, example).reward
                if reward < 1 if expected else reward > 0:
                    wrong.append(
                        f"{self.name}/{example.example_id}: the answer {str(answer)[-80:]!r} got "
                        f"{reward}, expected {expected}"
                    )
        return wrong


async def grade_response(
    benchmark: ExampleBenchmark, response: str, example: Example, config: BenchmarkConfig
) -> Grade:
    """Grades with ``config.grade_fn`` if it is set, else with the benchmark."""
    function: Callable[[str, Logs], Any] | None = config.grade_fn
    if function is None:
        return await benchmark.grade_async(response, example, config)
    reward = await run_in_daemon_thread(function, response, dict(example.logs))
    return Grade(float(await reward if inspect.isawaitable(reward) else reward))


class ExampleEnv(Env):
    """One example as a single-turn environment with the grader's reward."""

    def __init__(
        self,
        benchmark: ExampleBenchmark,
        example: Example,
        renderer: Renderer,
        config: BenchmarkConfig,
    ) -> None:
        self.benchmark, self.example, self.renderer = benchmark, example, renderer
        self.config, self.example_id = config, example.example_id

    @property
    def messages(self) -> list[Message]:
        """The prompt's messages."""
        return self.benchmark.prompt_messages(self.example, self.config)

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Returns the rendered prompt and the stop sequences."""
        prompt = await asyncio.to_thread(self.renderer.build_generation_prompt, self.messages)
        return prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grades the answer and ends the episode."""
        message, _ = await asyncio.to_thread(self.renderer.parse_response, action)
        text, _ = split_thinking(get_text_content(message))
        grade = await grade_response(self.benchmark, text, self.example, self.config)
        truncated = (extra or {}).get("stop_reason") == "length"
        metrics = {**grade.metrics, METRIC_MAX_TOKENS_REACHED: float(truncated)}
        return StepResult.final(
            grade.reward,
            self.renderer.get_stop_sequences(),
            metrics=metrics,
            logs={"answer": text, **self.example.logs, **grade.logs},
        )
