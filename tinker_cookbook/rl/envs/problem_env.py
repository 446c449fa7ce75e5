"""Environments of one question and one answer, of which a program can tell whether it is right."""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import bounded, run_in_daemon_thread
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Logs,
    Metrics,
    Observation,
    StepResult,
    StopCondition,
)
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.rl.rollouts.limits import RolloutConfig
else:
    tinker = lazy_module("tinker")

logger = logging.getLogger(__name__)


class ProblemEnv(Env):
    """Asks one question and pays for the answer: ``format_coef * (format - 1) + correct``.

    ``format`` is 1 where ``check_format`` holds and the answer ended with the renderer's stop
    sequence, ``correct`` what ``check_answer`` says. So a right answer earns 1, and
    ``format_coef`` is what bad form costs.

    Args:
        renderer: Writes the prompt and reads the answer.
        convo_prefix: Messages before the question: a system prompt, examples.
        format_coef: Cost of bad form.
        require_stop_sequence_for_format: Whether an answer that ended otherwise than with the stop
            sequence (with the end-of-text token, say) is bad form. One that was cut off always is.
    """

    def __init__(
        self,
        renderer: Renderer,
        convo_prefix: Sequence[Message] | None = None,
        format_coef: float = 0.1,
        require_stop_sequence_for_format: bool = True,
    ) -> None:
        self.renderer = renderer
        self.convo_prefix: list[Message] = list(convo_prefix or [])
        self.format_coef = format_coef
        self.require_stop_sequence_for_format = require_stop_sequence_for_format
        self._grader_timeout: float | None = None

    @abstractmethod
    def get_question(self) -> str:
        """The user's message."""

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool | float | Awaitable[bool | float]:
        """Whether the answer is right, or how much of it, from 0 to 1.

        A plain method runs in a thread, where it may block; an ``async`` one runs on the event
        loop, where it must not.
        """

    @abstractmethod
    def check_format(self, sample_str: str) -> bool:
        """Whether an answer can be found in the text at all."""

    @abstractmethod
    def get_reference_answer(self) -> str:
        """The right answer, for transcripts."""

    @property
    def messages(self) -> list[Message]:
        """The conversation that the answer belongs to: the prefix and the question."""
        return [*self.convo_prefix, Message(role="user", content=self.get_question())]

    @property
    def stop_condition(self) -> StopCondition:
        """What ends the answer."""
        return self.renderer.get_stop_sequences()

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Takes over ``grader_timeout_seconds``, for ``check_answer``."""
        self._grader_timeout = config.termination_policy.grader_timeout_seconds

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The prefix and the question."""
        return await asyncio.to_thread(self._prompt), self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grades the answer; the episode is over."""
        text, has_format, logs = await asyncio.to_thread(self._read, action)
        correct, metrics = await self._grade(text)
        return StepResult.final(
            self.format_coef * (has_format - 1) + correct,
            self.stop_condition,
            metrics={"format": has_format, "correct": correct, **metrics},
            logs=logs,
        )

    def _prompt(self) -> Observation:
        return self.renderer.build_generation_prompt(self.messages)

    def _read(self, action: Action) -> tuple[str, float, Logs]:
        message, ending = self.renderer.parse_response(action)
        text = get_text_content(message)
        strict = self.require_stop_sequence_for_format
        ended = ending.is_stop_sequence if strict else ending.is_clean
        logs: Logs = {
            "question": self.get_question(),
            "answer": text,
            "reference": self.get_reference_answer(),
        }
        return text, float(ended and bool(self.check_format(text))), logs

    async def _grade(self, text: str) -> tuple[float, Metrics]:
        if self._grader_timeout is None:
            return await self._check_answer(text), {}
        try:
            correct = await bounded(
                self._check_answer(text), self._grader_timeout, _GraderTimeoutError
            )
        except _GraderTimeoutError:
            return 0.0, {"grader_timeout": 1.0}
        return correct, {"grader_timeout": 0.0}

    async def _check_answer(self, text: str) -> float:
        if inspect.iscoroutinefunction(self.check_answer):
            verdict = await self.check_answer(text)
        else:
            verdict = await run_in_daemon_thread(self.check_answer, text)
            if inspect.isawaitable(verdict):
                verdict = await verdict
        try:
            return float(verdict)
        except (TypeError, ValueError):
            raise DataValidationError(
                f"check_answer returned {verdict!r}, expected True, False or a number"
            ) from None


class _GraderTimeoutError(Exception):
    """``grader_timeout_seconds`` are over."""


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """A group of copies of one problem.

    Attributes:
        env_thunk: Makes one copy; must pickle where groups are played in other processes
            (``functools.partial`` does, a lambda does not).
        num_envs: Copies, which is the group size.
        dataset_name: Tag of the group's metrics.
    """

    env_thunk: Callable[[], Env]
    num_envs: int
    dataset_name: str = "problems"

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ConfigurationError(f"num_envs: got {self.num_envs}, expected at least 1")

    async def make_envs(self) -> Sequence[Env]:
        """``num_envs`` copies."""
        return [self.env_thunk() for _ in range(self.num_envs)]

    async def make_env(self, index: int) -> Env:
        """One copy; they are all the same."""
        return self.env_thunk()

    def logging_tags(self) -> list[str]:
        """The name of the dataset."""
        return [self.dataset_name]
