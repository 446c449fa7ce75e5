"""Teachers of on-policy distillation with another prompt than the student's.

A teacher may have another chat format than the student, or another prompt: a system prompt,
examples, a hint at the answer. It scores the student's tokens after that prompt. Only the tokens
that end an answer are translated, because they depend on the chat format.
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
from tinker_cookbook.tokenizer_utils import decode_exactly

_TAG = "dataset_"

_LONGEST_TOKEN = 64  # characters; text may follow the stop string within its last token


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
        self._student, self._teacher = student, teacher
        self._stops = student.get_stop_sequences()
        self._same = self._stops == teacher.get_stop_sequences()

    def translate(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Returns the number of end-of-answer tokens, and the teacher's tokens for them."""
        if self._same or not tokens:
            return 0, []
        # A stop token is exactly the last token.
        if tokens[-1] in self._stops:
            return 1, self._ending("")
        # If the stop is a string, its first token may also contain the end of the answer. Then the
        # teacher's tokens begin with that text.
        texts = [stop for stop in self._stops if isinstance(stop, str)]
        # Decode endings of increasing length; a longer ending cannot begin with a stop string.
        longest = max(map(len, texts), default=0) + _LONGEST_TOKEN
        for count in range(1, len(tokens) + 1):
            tail = decode_exactly(self._student.tokenizer, tokens[-count:])
            stop = next((text for text in texts if text in tail), None)
            if stop is not None:
                return count, self._ending(tail.partition(stop)[0])
            if len(tail) > longest:
                break
        return 0, []

    def _ending(self, text: str) -> list[int]:
        stop = self._teacher.get_stop_sequences()[0]
        encode = self._teacher.codec.encode
        if isinstance(stop, str):
            return list(encode(text + stop))
        return [*encode(text), stop]

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
            # The teacher does not expect the stop token of another format: without translation, the
            # ending would have a large KL for every answer.
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
                # An ending may have a different number of tokens in the teacher's format. So the
                # difference between student and teacher over the whole ending is divided evenly
                # among the student's tokens.
                sampled = np.asarray(turn.ac.logprobs[body:], dtype=np.float64)
                score = float(values[start : start + len(ending)].sum())
                out.append(sampled - (float(sampled.sum()) - score) / count)
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
