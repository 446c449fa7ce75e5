"""Teachers of on-policy distillation with another prompt than the student's.

A teacher may have another chat format than the student, or another prompt: a system prompt,
examples, a hint at the answer. It scores the student's tokens after that prompt. Only the stop
token of an answer is translated, because it depends on the chat format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.distillation.datasets import ANSWER
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Observation,
    Trajectory,
    Transition,
)

_TAG = "dataset_"


@dataclass(frozen=True)
class TeacherView:
    """Renderer of the teacher's prompt from the student's conversation."""

    renderer: Renderer
    system_prompt: str | None = None
    convo_prefix: tuple[Message, ...] = ()
    answer_hint: str | None = None

    def render(self, answer: str, messages: Sequence[Message]) -> Observation:
        """Renders the teacher's prompt; ``answer`` fills the hint."""
        return self.renderer.build_generation_prompt(self.messages(answer, messages))

    def messages(self, answer: str, messages: Sequence[Message]) -> list[Message]:
        """Returns the conversation with the teacher's additional messages."""
        # The teacher's system prompt is put before the conversation's, in one message;
        # then the teacher's messages, and the rest of the conversation.
        rest = list(messages)
        head: list[Message] = []
        if rest and rest[0]["role"] == "system" and (self.system_prompt or self.convo_prefix):
            head = [rest.pop(0)]
        if self.system_prompt:
            own = Message(role="system", content=self.system_prompt)
            head = [_append_text(own, f"\n\n{get_text_content(head[0])}") if head else own]
        if self.answer_hint is not None:
            # The hint is for the question that the student currently answers.
            last = max((i for i, m in enumerate(rest) if m["role"] == "user"), default=None)
            if last is not None:
                rest[last] = _append_text(rest[last], self.answer_hint.replace(ANSWER, answer))
        return [*head, *self.convo_prefix, *rest]

    def attach_to(self, env: Env) -> Env:
        """Makes an environment also render its conversation for the teacher."""
        answer = ""
        if self.answer_hint is not None and ANSWER in self.answer_hint:
            get_answer = getattr(env, "get_reference_answer", None)
            answer = get_answer() if get_answer is not None else ""
            if not answer:
                raise ConfigurationError(
                    f"answer_hint: got {self.answer_hint!r}, but {type(env).__name__} has no "
                    "reference answer to put into it; expected an environment whose "
                    "get_reference_answer returns one, or a hint without " + ANSWER
                )
        env.teacher_prompt = partial(self.render, answer)
        return env


def _append_text(message: Message, text: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + text}
    return {**message, "content": [*content, {"type": "text", "text": text}]}


class AnswerEndings:
    """Translates end-of-answer tokens to the teacher's chat format; keeps other tokens."""

    def __init__(self, student: Renderer, teacher: Renderer) -> None:
        self._teacher, self._stops = teacher, student.get_stop_sequences()
        self._same = self._stops == teacher.get_stop_sequences()

    def translate(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Returns the number of stop tokens (0 or 1), and the teacher's tokens for them."""
        # Stop strings are part of the text, which the teacher reads as it is.
        if self._same or not tokens or tokens[-1] not in self._stops:
            return 0, []
        stop = self._teacher.get_stop_sequences()[0]
        return 1, list(self._teacher.codec.encode(stop)) if isinstance(stop, str) else [stop]

    def to_teacher(self, trajectory: Trajectory) -> Trajectory:
        """Returns the trajectory with the teacher's prompts and end-of-answer tokens."""
        turns: list[Transition] = []
        for turn in trajectory.transitions:
            if turn.ac.tokens and turn.teacher_ob is None:
                raise DataValidationError(
                    "a turn has no teacher prompt: it was sampled before the teacher had one; "
                    "start a new run, or use the earlier teacher settings"
                )
            count, ending = self.translate(turn.ac.tokens)
            # The teacher does not expect the stop token of another format, so without translation
            # it would have a large KL in every answer.
            tokens = [*turn.ac.tokens[: len(turn.ac.tokens) - count], *ending]
            ob = turn.ob if turn.teacher_ob is None else turn.teacher_ob
            # Placeholder zeros: the teacher's log-probabilities are computed later.
            action = TokensWithLogprobs(tokens, [0.0] * len(tokens))
            turns.append(replace(turn, ob=ob, ac=action))
        return Trajectory(turns, trajectory.final_ob)

    def to_student(
        self, trajectory: Trajectory, values: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Maps scores of the teacher's tokens to the student's tokens in ``trajectory``."""
        out = [np.empty(0)]
        start = 0
        for turn in trajectory.transitions:
            if turn.is_masked or not turn.ac.tokens:
                continue
            count, ending = self.translate(turn.ac.tokens)
            body = len(turn.ac.tokens) - count
            out.append(values[start : start + body])
            start += body
            if count:
                # The stop may be several tokens in the teacher's format: their sum is its score.
                out.append(np.array([values[start : start + len(ending)].sum()]))
                start += len(ending)
        return np.concatenate(out)


class TeacherGroupBuilder(EnvGroupBuilder):
    """Group builder that adds the teacher's prompt ``view``; its first tag selects the teacher."""

    def __init__(
        self, group: EnvGroupBuilder, dataset_index: int, view: TeacherView | None
    ) -> None:
        self.group, self.dataset_index, self.view = group, dataset_index, view
        self.compute_group_rewards, self.cleanup = group.compute_group_rewards, group.cleanup

    async def make_envs(self) -> Sequence[Env]:
        """Creates the environments, with the teacher's prompt attached."""
        envs = await self.group.make_envs()
        return envs if self.view is None else [self.view.attach_to(env) for env in envs]

    async def make_env(self, index: int) -> Env:
        """Creates one environment, with the teacher's prompt attached."""
        env = await self.group.make_env(index)
        return env if self.view is None else self.view.attach_to(env)

    def logging_tags(self) -> list[str]:
        """Returns the tag of the dataset, then the tags of the group."""
        return [f"{_TAG}{self.dataset_index}", *self.group.logging_tags()]


def dataset_index(tags: Sequence[str]) -> int:
    """Returns the index of the dataset from the first tag of a group."""
    return int(tags[0].removeprefix(_TAG))
