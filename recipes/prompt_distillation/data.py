"""Distilled conversations as training data, with a part held out by query."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import chz

from tinker_cookbook.eval.answer_accuracy import AnswerAccuracyEvaluator
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.recipes.prompt_distillation.create_data import run_folder
from tinker_cookbook.recipes.prompt_distillation.tasks import Query, check_label
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.supervised.conversation_file import ChatDataset, naming, read_conversations
from tinker_cookbook.supervised.json_files import json_lines
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset


@dataclass
class AnsweredQuery:
    """A query, without the teacher's prompt, and the teacher's answers to it."""

    question: list[Message]
    group: str
    label: str | None
    conversations: list[list[Message]] = field(default_factory=list)
    """One per kept answer."""

    @property
    def teacher(self) -> str | None:
        """The teacher's most frequent answer; ``None`` if all were dropped."""
        answers = Counter(get_text_content(messages[-1]).strip() for messages in self.conversations)
        return answers.most_common(1)[0][0] if answers else None


def read_answers(path: str, labels: Collection[str] | None = None) -> list[AnsweredQuery]:
    """Returns the queries of a file that ``create_data`` made, also those with dropped answers.

    Any file of conversations that end in an answer works too; rows may have ``id``, ``group`` and
    ``label``. Raises ``DataError``, with the line, for an answer that is none of ``labels``.
    """
    file = Path(path).expanduser()
    found: dict[str, AnsweredQuery] = {}
    with naming("file_path"):
        conversations = read_conversations(path)
    for (where, row), messages in zip(json_lines(file), conversations, strict=True):
        *question, answer = messages
        if answer["role"] != "assistant" or not question:
            raise DataFormatError(
                f"{where}: got {len(messages)} messages, the last of role {answer['role']!r}; "
                "expected a question and then, last, the answer to learn"
            )
        # A wrong label would be learned, so the file is checked before anything is loaded.
        check_label(get_text_content(answer).strip(), where, "the answer", labels)
        label = row.get("label")
        check_label(label, where, "label", labels)
        # Several answers to one query share an id. Files from elsewhere have none, so the text
        # identifies the query.
        key = row.get("id") or Query(repr(question)).id
        query = found.setdefault(key, AnsweredQuery(question, row.get("group") or key, label))
        query.conversations.append(messages)
    # A query without a kept answer is still evaluated: it counts as an error of the teacher.
    for row in read_rows(run_folder(path) / "dropped.jsonl"):
        question = [Message(role="user", content=row["query"])]
        found.setdefault(
            row["id"], AnsweredQuery(question, row.get("group") or row["id"], row.get("label"))
        )
    return list(found.values())


@chz.chz
class DistilledDatasetBuilder(ChatDatasetBuilder):
    """Training data from a file of distilled conversations; whole groups are held out."""

    file_path: str = chz.field(doc="File that create_data made")
    test_fraction: float = chz.field(default=0.25, doc="Share of the groups to hold out")
    split_seed: int = chz.field(default=0, doc="Seed of the split")
    labels: list[str] | None = chz.field(default=None, doc="Valid answers; None: any")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads, checks and splits the conversations."""
        self.common_config.check()
        train, test = self.split
        batch_size = self.common_config.batch_size
        # All kept answers to a query are trained on; the evaluation samples each query once.
        rows = [row for query in train for row in query.conversations]
        held_out = [row for query in test for row in query.conversations]
        if batch_size > len(rows):
            raise ConfigurationError(
                f"batch_size: got {batch_size}, expected at most {len(rows)}, the number of "
                f"conversations to train on in {self.file_path}"
            )
        train_set = ChatDataset(self, rows, batch_size)
        if not held_out:
            return train_set, None
        return train_set, ChatDataset(self, held_out, min(batch_size, len(held_out)))

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the first ``n`` questions held out."""
        return [query.question for query in self.split[1][:n]]

    @cached_property
    def split(self) -> tuple[list[AnsweredQuery], list[AnsweredQuery]]:
        """Queries to train on and held-out queries, in the order of the file; read once."""
        if not 0 <= self.test_fraction < 1:
            raise ConfigurationError(
                f"test_fraction: got {self.test_fraction}, expected 0 or more and less than 1"
            )
        groups: dict[str, list[AnsweredQuery]] = defaultdict(list)
        everything = read_answers(self.file_path, self.labels)
        for query in everything:
            groups[query.group].append(query)
        # Whole groups are held out, because a translation of a training sentence is not new text.
        # Sorted, so that the split does not depend on the order of the file.
        names = sorted(groups)
        random.Random(self.split_seed).shuffle(names)
        held_out = set(names[: round(self.test_fraction * len(names))])
        train = [query for query in everything if query.group not in held_out]
        return train, [query for query in everything if query.group in held_out]


@chz.chz
class StudentAccuracyBuilder:
    """Builds the evaluation of the student, without the prompt, on the queries held out.

    ``test/agreement``: share of answers equal to the teacher's; should rise towards 1.
    ``test/accuracy``: share of right answers, where these are known; should rise towards the
    teacher's. ``test/teacher_accuracy``: the teacher's with the prompt on the same texts, where a
    dropped answer counts as wrong; constant.
    """

    dataset: DistilledDatasetBuilder = chz.field(doc="Where the queries come from")
    max_tokens: int = chz.field(default=8, doc="Maximum tokens of an answer")

    def __call__(self) -> AnswerAccuracyEvaluator:
        """Returns the evaluator."""
        held_out = self.dataset.split[1]
        right = [query.label for query in held_out]
        teacher = [query.teacher for query in held_out]
        # The teacher's answers are in the file, so its accuracy needs no samples and is constant.
        known = [pair for pair in zip(teacher, right, strict=True) if pair[1] is not None]
        constants: dict[str, float] = {}
        if known:
            constants["teacher_accuracy"] = sum(answer == label for answer, label in known) / len(
                known
            )
        return AnswerAccuracyEvaluator(
            [query.question for query in held_out],
            {"agreement": teacher, "accuracy": right},
            self.dataset.renderer,
            self.max_tokens,
            constants=constants,
        )
