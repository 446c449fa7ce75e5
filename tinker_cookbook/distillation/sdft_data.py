"""Data for self-distillation: questions with a good answer that only the teacher sees.

They come from a file of conversations (``DemonstrationBuilder``), or, batch by batch, from user
code as environments in which the student answers (``SDFTBatchProvider``). ``DemonstrationTexts``
and ``ProvidedTexts`` convert such a batch to answers to train on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import chz

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.distillation.sdft_targets import answer_datum, masked_datum
from tinker_cookbook.distillation.topk_distributions import number_of, numbered
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
)
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat, get_text_content
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.trajectory_metrics import compute_trajectory_metrics
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.supervised.conversation_file import ChatDataset, FromConversationFileBuilder
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.row_datasets import place_of
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.training.config import number, setting
from tinker_cookbook.utils.imports import tinker

DEFAULT_DEMO_TEMPLATE = (
    "{question}\n\n"
    "This is an example for a response to the question:\n"
    "{golden_answer}\n\n"
    "Now answer with a response of your own, including the thinking process."
)
"""Template of the teacher's question, which the official cookbook has from the authors of SDFT."""


@dataclass(frozen=True)
class Demonstration:
    """Prompt that ends with the user's question, and the answer shown to the teacher."""

    prompt: list[Message]
    answer: str

    @classmethod
    def of(cls, conversation: Sequence[Message], row: int) -> Demonstration:
        """Splits a conversation into its prompt and its last answer."""
        last = max(i for i, message in enumerate(conversation) if message["role"] == "assistant")
        prompt, answer = list(conversation[:last]), get_text_content(conversation[last])
        roles = ", ".join(message["role"] for message in conversation)
        if not prompt or prompt[-1]["role"] != "user" or not answer.strip():
            raise DataFormatError(
                f"row {row} of the demonstrations: got messages of roles {roles}, expected a user "
                "message followed by an assistant message with text"
            )
        return cls(prompt, answer)

    def teacher_prompt(
        self, renderer: Renderer, system_prompt: str | None, demo_template: str
    ) -> tinker.ModelInput:
        """Renders the prompt with the demonstration in its last message."""
        question = get_text_content(self.prompt[-1])
        # In the last message, as part of the question.
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
    """Renders the teacher's prompt; the student's answer is scored after it."""
    demonstration = Demonstration([Message(role="user", content=question)], golden_answer)
    return demonstration.teacher_prompt(renderer, system_prompt, demo_template)


def check_demo_template(template: str) -> None:
    """Raises ``ConfigurationError`` unless the template has exactly its two fields."""
    valid = "{question}" in template and "{golden_answer}" in template
    try:
        template.format(question="", golden_answer="")
    except (KeyError, IndexError, ValueError):
        valid = False
    if not valid:
        raise ConfigurationError(
            f"demo_template: got {template!r}, expected the fields {{question}} and "
            "{golden_answer}; double all other braces"
        )


@chz.chz
class DemonstrationBuilder(FromConversationFileBuilder):
    """Conversations of a JSONL file with the last answer as the demonstration."""

    @property
    def train_on_what(self) -> TrainOnWhat:
        """Trains only on the last answer."""
        return TrainOnWhat.LAST_ASSISTANT_MESSAGE

    @cached_property
    def demonstrations(self) -> list[Demonstration]:
        """Training demonstrations, by the number in their datums."""
        return [Demonstration.of(row, i) for i, row in enumerate(self._split[0])]

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Builds numbered datums of the demonstrations; test datums have no numbers."""
        self.common_config.check()
        batch_size, max_length = self.common_config.batch_size, self.common_config.max_length
        train, test = self._split

        # The row number links a datum to its demonstration.
        def datum(row: tuple[int, list[Message]]) -> tinker.Datum:
            number, talk = row
            made = conversation_to_datum(talk, self.renderer, max_length, self.train_on_what)
            return numbered(made, number)

        rows = list(enumerate(train))
        train_set = SupervisedDatasetFromHFDataset(rows, batch_size, map_fn=datum)
        test_set = ChatDataset(self, test, min(batch_size, len(test))) if test else None
        return train_set, test_set

    @cached_property
    def _split(self) -> tuple[list[list[Message]], list[list[Message]]]:
        train, test = super()._split
        for rows in (train, test):
            for i in range(len(rows)):
                if has_images(rows[i]):
                    raise DataFormatError(
                        f"{place_of(rows, i)}: messages: got an image, but the teacher reads "
                        "questions as text; expected text, or supervised fine-tuning "
                        "(recipes.sl_basic), which takes images"
                    )
        return [_up_to_answer(row) for row in train], [_up_to_answer(row) for row in test]


def _up_to_answer(conversation: list[Message]) -> list[Message]:
    last = max(i for i, message in enumerate(conversation) if message["role"] == "assistant")
    return conversation[: last + 1]


@runtime_checkable
class SDFTBatchProvider(Protocol):
    """Batches of questions with golden answers."""

    def get_batch(self, index: int) -> tuple[Sequence[EnvGroupBuilder], list[str], list[str]]:
        """Returns environments, questions and golden answers, one of each per problem."""
        ...

    def __len__(self) -> int:
        """Number of batches."""
        ...


class ProvidedEnvironments(RLDataset):
    """Environments of a provider or dataset, for evaluation."""

    def __init__(self, dataset: SDFTBatchProvider | RLDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the group builders of a batch."""
        batch: Any = self._dataset.get_batch(index)
        return batch[0] if isinstance(batch, tuple) else batch


@chz.chz
class SDFTSettings:
    """Settings of self-distillation, shared with recipes."""

    on_policy: bool = setting(True, "Train on the student's answers; False: on the demonstrations")
    group_size: int = number(1, "Answers per question", low=1)
    max_tokens: int = number(2048, "Maximum tokens of an answer", low=1)
    temperature: float = setting(1.0, "Sampling temperature of the student")
    topk: int = setting(20, "Targets per position: the teacher's most probable tokens")
    reverse: bool = setting(
        False, "Use the reverse KL over the teacher's top K instead of cross-entropy"
    )
    demo_template: str = setting(
        DEFAULT_DEMO_TEMPLATE, "Teacher's question, with {question} and {golden_answer}"
    )
    system_prompt: str | None = setting(
        None, "Teacher's system message if the conversation has none"
    )
    skip_first_n_tokens: int = number(3, "Number of first tokens of an answer without training")
    teacher_sync_every: int | None = setting(
        None, "Steps after which the teacher gets the student's weights; None: never"
    )
    teacher_concurrency: int = number(64, "Answers that the teacher scores concurrently", low=1)
    max_context_length: int = number(
        32768, "Maximum tokens of teacher prompt and answer; at most the model's context", low=2
    )
    num_substeps: int = setting(1, "Only 1 is supported: one optimizer step per batch")


Texts: TypeAlias = tuple[list["tinker.Datum"], list["tinker.ModelInput"], dict[str, float]]
"""Answers as datums with a ``mask``, the teacher's prompt for each answer, and metrics."""

GetPolicy: TypeAlias = Callable[[], TokenCompleter]
"""Function that returns the student with its current weights."""


class DemonstrationTexts:
    """Texts to train on: the student's answers to the questions, or the demonstrations."""

    def __init__(self, builder: DemonstrationBuilder, settings: SDFTSettings) -> None:
        self._builder, self._settings = builder, settings

    def teacher_prompt(self, row: int) -> tinker.ModelInput:
        """Returns the teacher's prompt: the question with the demonstration."""
        return self._builder.demonstrations[row].teacher_prompt(
            self._builder.renderer, self._settings.system_prompt, self._settings.demo_template
        )

    async def texts(self, step: int, data: Sequence[tinker.Datum], policy: GetPolicy) -> Texts:
        """Returns ``group_size`` answers per question; deterministic given seed and step."""
        rows = [number_of(datum) for datum in data]
        if not self._settings.on_policy:
            # The demonstrations are the answers; their weights mark the answers' tokens.
            answers = [
                masked_datum(
                    datum.model_input,
                    datum.loss_fn_inputs["target_tokens"].to_numpy(),
                    (datum.loss_fn_inputs["weights"].to_numpy() != 0).astype("float32"),
                )
                for datum in data
            ]
            return answers, [self.teacher_prompt(row) for row in rows], {}
        student, size = policy(), self._settings.group_size
        renderer = self._builder.renderer

        async def one(place: int, row: int) -> list[tinker.Datum]:
            prompt = renderer.build_generation_prompt(self._builder.demonstrations[row].prompt)
            # Derive the seed from step and position, so that a resumed run samples the same
            # answers.
            samples = await student.derived(step, place).sample_many(
                prompt, renderer.get_stop_sequences(), size
            )
            return [answer_datum(prompt, sample.tokens) for sample in samples]

        # Sample all questions concurrently, so that the backend forms large batches.
        groups = await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))
        prompts = [self.teacher_prompt(row) for row in rows for _ in range(size)]
        return [datum for group in groups for datum in group], prompts, {}


class ProvidedTexts(SupervisedDataset):
    """The student's samples in a provider's environments.

    For the batch loop it is a dataset in which batch i contains only the number i.
    """

    def __init__(
        self,
        provider: SDFTBatchProvider,
        teacher_prompt: Callable[[str, str], tinker.ModelInput],
    ) -> None:
        self._provider, self._teacher_prompt = provider, teacher_prompt

    def data_sources(self) -> dict[str, Any]:
        """Returns the provider."""
        return {"": self._provider}

    def __len__(self) -> int:
        return len(self._provider)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns one datum with the batch index as its number."""
        return [numbered(datum_from_tokens_weights([0, 0], [0.0, 1.0]), index)]

    async def texts(self, step: int, data: Sequence[tinker.Datum], policy: GetPolicy) -> Texts:
        """Runs the rollouts of a batch; returns answers, teacher prompts and metrics."""
        # In a thread, because a provider is user code and may block.
        builders_P, questions_P, golden_P = await asyncio.to_thread(
            self._provider.get_batch, number_of(data[0])
        )
        lengths = {len(builders_P), len(questions_P), len(golden_P)}
        if len(lengths) > 1:
            raise DataValidationError(
                f"sdft_dataset: batch {number_of(data[0])} has {len(builders_P)} environments, "
                f"{len(questions_P)} questions and {len(golden_P)} golden answers, expected one of "
                "each for every problem"
            )
        # Each group has its own seed, derived from step and position.
        student = policy()
        groups_P = await asyncio.gather(
            *(
                do_group_rollout(builder, student.derived(step, place))
                for place, builder in enumerate(builders_P)
            )
        )
        answers: list[tinker.Datum] = []
        prompts: list[tinker.ModelInput] = []
        for group, question, golden in zip(groups_P, questions_P, golden_P, strict=True):
            # Score all turns of a group after the same prompt with the golden answer.
            prompt = self._teacher_prompt(question, golden)
            made = [
                datum
                for trajectory in group.trajectories_G
                for datum in trajectory_to_data(trajectory, 0.0)
            ]
            answers += made
            prompts += [prompt] * len(made)
        tags_P = [builder.logging_tags() for builder in builders_P]
        return answers, prompts, compute_trajectory_metrics(list(groups_P), tags_P)
