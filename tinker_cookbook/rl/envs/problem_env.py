"""Single-turn environments: one question and one answer, graded by a program."""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import Content, Message, Renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import bounded, in_thread, run_in_daemon_thread
from tinker_cookbook.rl.rollouts.limits import RolloutConfig
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
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.user_classes import overrides

# Recipes of the official cookbook import it from here.
logger = logging.getLogger(__name__)


class ProblemEnv(Env):
    """Single-turn environment with the reward ``correct``, from 0 to 1.

    A subclass defines ``get_question`` and ``check_answer``. If it also overrides
    ``check_format``, the reward becomes ``correct + format_coef * (format - 1)``, where ``format``
    is 1 if ``check_format`` returns True and the answer ended with the renderer's stop sequence,
    else 0.

    Args:
        renderer: Renders the prompt and parses the answer.
        convo_prefix: Messages before the question: a system prompt, few-shot examples.
        format_coef: Penalty for a wrong format; unused unless ``check_format`` is overridden.
        require_stop_sequence_for_format: Whether an answer that ends without the stop sequence
            (for example, with the end-of-text token) has a wrong format. A truncated answer always
            has.
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
        self._answered: list[Message] = []

    @abstractmethod
    def get_question(self) -> Content:
        """Returns the content of the user message: a text, or parts of text and images."""

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool | float | Awaitable[bool | float]:
        """Returns whether the answer is right, or a score from 0 to 1.

        A plain method runs in a thread, where it may block; an ``async`` one runs on the event
        loop.
        """

    def check_format(self, sample_str: str) -> bool:
        """Override to check the format of the text; see the class."""
        return True

    def get_reference_answer(self) -> str:
        """Returns the reference answer, for transcripts and teachers' hints; ``""``: none."""
        return ""

    @property
    def messages(self) -> list[Message]:
        """The prefix and the question; after ``step`` also the answer."""
        if self._answered:
            return self._answered
        return [*self.convo_prefix, Message(role="user", content=self.get_question())]

    @property
    def stop_condition(self) -> StopCondition:
        """Stop sequences of the renderer."""
        return self.renderer.get_stop_sequences()

    def begin_rollout(self, config: RolloutConfig) -> None:
        """Stores ``grader_timeout_seconds``, the time limit of ``check_answer``."""
        self._grader_timeout = config.termination_policy.grader_timeout_seconds

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Returns the rendered prompt and the stop sequences."""
        # ``get_question`` may be slow too, so everything runs in the thread.
        prompt = await in_thread(lambda: self.renderer.build_generation_prompt(self.messages))
        return prompt, self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grades the answer and ends the episode."""
        # In a thread, because methods of the task may be slow.
        text, metrics, logs = await in_thread(self._parse, action)
        # A correct format adds 0 and a wrong one costs format_coef, so the best reward is 1.
        reward = self.format_coef * (metrics["format"] - 1) if "format" in metrics else 0.0
        limit = self._grader_timeout
        # Report zeros too, so that the mean over episodes is the share of timeouts.
        if limit is not None:
            metrics["grader_timeout"] = 0.0
        try:
            correct = await bounded(self._check_answer(text), limit, _GraderTimeoutError)
        except _GraderTimeoutError:
            correct, metrics["grader_timeout"] = 0.0, 1.0
        metrics["correct"] = correct
        return StepResult.final(reward + correct, self.stop_condition, metrics=metrics, logs=logs)

    def _parse(self, action: Action) -> tuple[str, Metrics, Logs]:
        """Returns the answer's text, its ``format`` metric if the task checks it, and the logs."""
        message, ending = self.renderer.parse_response(action)
        text = get_text_content(message)
        question = Message(role="user", content=self.get_question())
        self._answered = [*self.convo_prefix, question, message]
        logs: Logs = {"question": get_text_content(question), "answer": text}
        if reference := self.get_reference_answer():
            logs["reference"] = reference
        metrics: Metrics = {} if text.strip() else {"empty_answer": 1.0}
        # Without an override, the reward has no format term and the metric is not logged.
        if overrides(self, ProblemEnv, "check_format"):
            # Both exclude truncated answers; is_clean includes an end with the end-of-text token.
            strict = self.require_stop_sequence_for_format
            ended = ending.is_stop_sequence if strict else ending.is_clean
            metrics["format"] = float(ended and bool(self.check_format(text)))
        return text, metrics, logs

    async def _check_answer(self, text: str) -> float:
        with activity().waiting(f"{type(self).__name__}.check_answer"):
            if inspect.iscoroutinefunction(self.check_answer):
                verdict = await self.check_answer(text)
            else:
                # A daemon thread, because a grader that never returns must not block the program's
                # end.
                verdict = await run_in_daemon_thread(self.check_answer, text)
                if inspect.isawaitable(verdict):
                    verdict = await verdict
        try:
            return float(verdict)
        except (TypeError, ValueError):
            raise DataValidationError(
                f"check_answer returned {verdict!r}, expected True, False or a number"
            ) from None


# A separate class: a TimeoutError that check_answer raises itself is an error.
class _GraderTimeoutError(Exception):
    """``check_answer`` exceeded ``grader_timeout_seconds``."""


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """Builds a group of equal environments for one problem.

    ``env_thunk`` creates one environment; it must be picklable if groups run in other processes (a
    ``functools.partial`` is, a lambda is not). ``dataset_name`` is the tag of the group's metrics.
    """

    env_thunk: Callable[[], Env]
    num_envs: int
    dataset_name: str = "problems"

    async def make_envs(self) -> Sequence[Env]:
        """Creates ``num_envs`` environments."""
        # An environment runs one episode, so each member of the group gets a new one.
        return [self.env_thunk() for _ in range(self.num_envs)]

    async def make_env(self, index: int) -> Env:
        """Creates one environment; all members of the group are equal."""
        return self.env_thunk()

    def logging_tags(self) -> list[str]:
        """Returns the name of the dataset."""
        return [self.dataset_name]
