"""Demonstrations: a prompt and an answer that a teacher may look at, from a conversations file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.distillation.mixture import numbered
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, nearest
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat, get_text_content
from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder, chat_dataset
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import SupervisedDataset

if TYPE_CHECKING:
    import tinker

DEFAULT_DEMO_TEMPLATE = (
    "{question}\n\n"
    "Here is an example of a good response to it:\n"
    "{golden_answer}\n\n"
    "Now respond in your own words, with your reasoning if there is any."
)
"""What the teacher reads in place of the question."""


@dataclass(frozen=True)
class Demonstration:
    """``prompt`` ends with the user's question; ``answer`` is the text to show the teacher."""

    prompt: list[Message]
    answer: str

    @classmethod
    def of(cls, conversation: Sequence[Message], row: int) -> Demonstration:
        """The conversation up to its last answer, and that answer."""
        last = max(i for i, message in enumerate(conversation) if message["role"] == "assistant")
        prompt, answer = list(conversation[:last]), get_text_content(conversation[last])
        roles = ", ".join(message["role"] for message in conversation)
        if not prompt or prompt[-1]["role"] != "user" or not answer.strip():
            raise DataFormatError(
                f"row {row} of the demonstrations: got messages of roles {roles}, expected a user "
                "message and behind it, last of all answers, one with text"
            )
        return cls(prompt, answer)

    def teacher_prompt(
        self, renderer: Renderer, system_prompt: str | None, demo_template: str
    ) -> tinker.ModelInput:
        """The prompt with the demonstration in it; earlier messages stay as they are."""
        question = get_text_content(self.prompt[-1])
        shown = demo_template.format(question=question, golden_answer=self.answer)
        messages = [*self.prompt[:-1], Message(role="user", content=shown)]
        if system_prompt and messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=system_prompt))
        return renderer.build_generation_prompt(messages)


def build_sdft_teacher_prompt(
    question: str,
    golden_answer: str,
    renderer: Renderer,
    system_prompt: str | None = None,
    demo_template: str = DEFAULT_DEMO_TEMPLATE,
) -> tinker.ModelInput:
    """The teacher's prompt: ``question`` with ``golden_answer`` beside it.

    Put a student's answer behind it, and the teacher scores that answer knowing a good one.
    """
    demonstration = Demonstration([Message(role="user", content=question)], golden_answer)
    return demonstration.teacher_prompt(renderer, system_prompt, demo_template)


def check_demo_template(template: str) -> None:
    """Raises ``ConfigurationError`` where it has other fields than the two it needs."""
    marks = {"question": "\x00Q\x00", "golden_answer": "\x00A\x00"}
    try:
        filled = template.format(**marks)
    except (KeyError, IndexError, ValueError) as error:
        name = str(error.args[0]) if isinstance(error, KeyError) else ""
        raise ConfigurationError(
            f"demo_template: got {template!r}, which cannot be filled in "
            f"({error}){nearest(name, marks) if name else ''}; expected the fields {{question}} "
            "and {golden_answer}, other braces doubled"
        ) from error
    missing = [f"{{{name}}}" for name, mark in marks.items() if mark not in filled]
    if missing:
        raise ConfigurationError(
            f"demo_template: got {template!r}, expected {' and '.join(missing)} in it"
        )


@chz.chz
class DemonstrationBuilder(FromConversationFileBuilder):
    """Conversations of a JSONL file, the last answer of each as the demonstration."""

    @property
    def train_on_what(self) -> TrainOnWhat:
        """The last answer alone."""
        return TrainOnWhat.LAST_ASSISTANT_MESSAGE

    @cached_property
    def demonstrations(self) -> list[Demonstration]:
        """Those to train on, by the number that their datums carry."""
        return [Demonstration.of(row, i) for i, row in enumerate(self._split[0])]

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Numbered datums of the demonstrations themselves; test data without numbers."""
        self.common_config.check()
        batch_size, max_length = self.common_config.batch_size, self.common_config.max_length
        train, test = self._split

        def datum(row: int) -> tinker.Datum:
            made = conversation_to_datum(train[row], self.renderer, max_length, self.train_on_what)
            return numbered(made, row)

        train_set = SupervisedDatasetFromHFDataset(range(len(train)), batch_size, map_fn=datum)
        test_set = chat_dataset(self, test, min(batch_size, len(test))) if test else None
        return train_set, test_set

    @cached_property
    def _split(self) -> tuple[list[list[Message]], list[list[Message]]]:
        train, test = super()._split
        return [_up_to_answer(row) for row in train], [_up_to_answer(row) for row in test]


def _up_to_answer(conversation: list[Message]) -> list[Message]:
    last = max(i for i, message in enumerate(conversation) if message["role"] == "assistant")
    return conversation[: last + 1]
