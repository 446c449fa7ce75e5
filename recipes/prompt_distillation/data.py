"""Distilled conversations as training data, with a part held out by query."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import chz

from tinker_cookbook.eval.answer_accuracy import AnswerAccuracyEvaluator
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.recipes.prompt_distillation.create_data import DEFAULT_OUTPUT_FILE, run_folder
from tinker_cookbook.recipes.prompt_distillation.tasks import Query, check_label
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.supervised.conversation_file import ChatDataset, naming, read_conversations
from tinker_cookbook.supervised.json_files import json_lines
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.training.config import number


@dataclass
class AnsweredQuery:
    """A query, without the teacher's prompt, and the teacher's answer if it was kept."""

    question: list[Message]
    group: str
    label: str | None
    answer: Message | None = None

    @property
    def teacher(self) -> str | None:
        """The text of the teacher's answer."""
        return self.answer and get_text_content(self.answer).strip()


def read_answers(path: str, labels: Collection[str] | None = None) -> list[AnsweredQuery]:
    """Returns the queries of a file that ``create_data`` made, also those with dropped answers.

    Any file of conversations that end in an answer works too; rows may have ``group`` and
    ``label``. Raises ``DataError``, with the line, for an answer that is none of ``labels``.
    """
    found: list[AnsweredQuery] = []
    with naming("file_path"):
        conversations = read_conversations(path)
    rows = json_lines(Path(path).expanduser())
    for (where, row), messages in zip(rows, conversations, strict=True):
        *question, answer = messages
        if answer["role"] != "assistant" or not question:
            raise DataFormatError(f"{where}: expected a question and then, last, the answer")
        # A wrong label would be learned, so the file is checked before anything is loaded.
        check_label(get_text_content(answer).strip(), where, "the answer", labels)
        check_label(row.get("label"), where, "label", labels)
        group = row.get("group") or Query(repr(question)).id
        found.append(AnsweredQuery(question, group, row.get("label"), answer))
    # A query without a kept answer is still evaluated: it counts as an error of the teacher.
    for row in read_rows(run_folder(path) / "dropped.jsonl"):
        question = [Message(role="user", content=row["query"])]
        found.append(AnsweredQuery(question, row["group"] or row["id"], row["label"]))
    return found


@chz.chz
class SplitSettings:
    """The file and its held-out part; of the dataset and the recipe."""

    file_path: str = chz.field(default=DEFAULT_OUTPUT_FILE, doc="File that create_data made")
    test_fraction: float = number(0.25, "Share of the groups to hold out", below=1)
    split_seed: int = chz.field(
        default=0, doc="Split seed, separate from seed: runs share one held-out part"
    )


@chz.chz
class DistilledDatasetBuilder(SplitSettings, ChatDatasetBuilder):
    """Training data from a file of distilled conversations; whole groups are held out."""

    labels: list[str] | None = chz.field(default=None, doc="Valid answers; None: any")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads, checks and splits the conversations."""
        train, test = (
            [[*query.question, query.answer] for query in part if query.answer is not None]
            for part in self.split
        )
        size = self.common_config.batch_size
        train_set = ChatDataset(self, train, size)
        return train_set, ChatDataset(self, test, min(size, len(test))) if test else None

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the first ``n`` questions held out."""
        return [query.question for query in self.split[1][:n]]

    @cached_property
    def split(self) -> tuple[list[AnsweredQuery], list[AnsweredQuery]]:
        """Queries to train on and held-out queries, in the order of the file; read once."""
        everything = read_answers(self.file_path, self.labels)
        # Whole groups are held out, because a translation of a training sentence is not new text.
        # Sorted, so that the split does not depend on the order of the file.
        names = sorted({query.group for query in everything})
        random.Random(self.split_seed).shuffle(names)
        held_out = set(names[: round(self.test_fraction * len(names))])
        train = [query for query in everything if query.group not in held_out]
        return train, [query for query in everything if query.group in held_out]


def student_accuracy(dataset: DistilledDatasetBuilder, max_tokens: int) -> AnswerAccuracyEvaluator:
    """Returns the evaluation of the student, without the prompt, on the queries held out.

    ``test/agreement``: share of answers equal to the teacher's; should rise towards 1.
    ``test/accuracy``: share of right answers, where these are known; should rise towards the
    teacher's. ``test/teacher_accuracy``: the teacher's with the prompt on the same texts, where a
    dropped answer counts as wrong; constant.
    """
    held_out = dataset.split[1]
    known = [query.teacher == query.label for query in held_out if query.label is not None]
    return AnswerAccuracyEvaluator(
        [query.question for query in held_out],
        {
            "agreement": [query.teacher for query in held_out],
            "accuracy": [query.label for query in held_out],
        },
        dataset.renderer,
        max_tokens,
        constants={"teacher_accuracy": sum(known) / len(known)} if known else None,
    )
