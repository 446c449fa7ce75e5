"""Datasets of comparisons, and training data for a reward model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeAlias

import chz
import numpy as np

from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataFormatError,
    DataValidationError,
    TinkerCookbookError,
)
from tinker_cookbook.preference.comparison import (
    ComparisonRenderer,
    ComparisonRendererFromChatRenderer,
    LabeledComparison,
    is_empty,
)
from tinker_cookbook.preference.comparison_file import comparison_of_row, read_comparison_rows
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.supervised.arrow_rows import without_arrow_nulls
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.supervised.conversation_file import held_out_mask
from tinker_cookbook.supervised.conversation_row import data_error
from tinker_cookbook.supervised.data import Rows, SupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.row_datasets import PlacedRows, place_of
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.training.config import setting
from tinker_cookbook.utils.imports import tinker

logger = logging.getLogger(__name__)


class SkipReason(StrEnum):
    """Reason why a comparison is skipped, as written to the log."""

    NO_COMPARISON = "nothing to compare (such as dialogues that do not diverge at an answer)"
    EQUAL = "answers that are the same"
    EMPTY = "an empty answer"
    TIE = "a tie"
    LONG_PROMPT = "a prompt that fills max_length"
    EQUAL_WHEN_CUT = "answers that are the same up to max_length"
    LONG_COMPARISON = "more than max_length tokens, which would truncate the label"


class Dropped(dict[Hashable, str]):
    """Skipped rows with their reasons; a row counts once in all epochs."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by reason, the most frequent reason first."""
        return dict(Counter(self.values()).most_common())

    def describe(self, noun: str = "comparisons") -> str:
        """Returns a sentence such as "3 comparisons skipped: 2 with an empty answer, …"."""
        parts = ", ".join(f"{count} with {reason}" for reason, count in self.counts.items())
        return f"{len(self)} {noun} skipped: {parts}" if parts else f"no {noun} skipped"


@dataclass
class ComparisonSet:
    """Usable comparisons, and the rows that were skipped."""

    usable: list[LabeledComparison] = field(default_factory=list)
    dropped: Dropped = field(default_factory=Dropped)

    def add(self, row: int, labeled: LabeledComparison | None, place: str = "") -> None:
        """Adds the comparison of row number ``row``, or records why it is skipped."""
        if labeled is None:
            self.dropped[row] = SkipReason.NO_COMPARISON
            return
        labeled.place = place
        first, second = labeled.comparison.completion_A, labeled.comparison.completion_B
        if is_empty(first) or is_empty(second):
            self.dropped[row] = SkipReason.EMPTY
        # Equal answers are a valid tie, and if answers are sampled only the prompt is needed.
        elif first == second and labeled.label != "Tie":
            self.dropped[row] = SkipReason.EQUAL
        else:
            self.usable.append(labeled)

    def prompts(self, n: int, renderer: Renderer) -> list[list[Message]]:
        """Returns the first ``n`` distinct prompts, with their tools declared."""
        prompts: list[list[Message]] = []
        for labeled in self.usable:
            if len(prompts) >= n:
                break
            prompt = labeled.comparison.prompt(renderer)
            if prompt not in prompts:
                prompts.append(prompt)
        return prompts


@chz.chz
class ComparisonDatasetBuilder:
    """Base class: a subclass reads and parses rows, or overrides ``comparison_sets``."""

    swap: bool = setting(False, "Return training comparisons in both orders (A, B) and (B, A)")

    def get_train_and_test_datasets(self) -> tuple[Rows, Rows | None]:
        """Returns the training rows and, if any, the held-out rows."""
        raise NotImplementedError(f"{type(self).__name__} must define get_train_and_test_datasets")

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison | None:
        """Parses a row; returns None for a row to skip."""
        raise NotImplementedError(
            f"{type(self).__name__} must define example_to_labeled_comparison"
        )

    @cached_property
    def comparison_sets(self) -> tuple[ComparisonSet, ComparisonSet | None]:
        """Training and held-out comparisons in one order, read once."""
        train, test = self.get_train_and_test_datasets()
        return (
            self._comparison_set(train, "training"),
            None if test is None else self._comparison_set(test, "held-out"),
        )

    def get_labeled_comparisons(
        self,
    ) -> tuple[list[LabeledComparison], list[LabeledComparison] | None]:
        """Returns training comparisons (with ``swap``, in both orders) and held-out comparisons."""
        train, test = self.comparison_sets
        # Held-out comparisons stay in one order, because evaluators add the other order.
        both = [one for c in train.usable for one in ((c, c.swap()) if self.swap else (c,))]
        return both, None if test is None else test.usable

    def _comparison_set(self, rows: Rows, part: str) -> ComparisonSet:
        found, rows = ComparisonSet(), without_arrow_nulls(rows)
        for i in range(len(rows)):
            try:
                found.add(i, self.example_to_labeled_comparison(rows[i]), place_of(rows, i))
            except TinkerCookbookError as error:
                raise DataFormatError(f"{place_of(rows, i)}: {error}") from error
        if found.dropped:
            logger.warning("%s data: %s", part, found.dropped.describe())
        if not found.usable:
            raise DataValidationError(
                f"{part} data: got {len(rows)} rows without a usable comparison, expected at least "
                f"one; {found.dropped.describe()}"
            )
        return found


@chz.chz
class ComparisonBuilderFromJsonl(ComparisonDatasetBuilder):
    """Comparisons from files, in any of the formats of ``comparison_file``."""

    train_path: str = chz.field(doc="File of comparisons: jsonl, json, csv, tsv, parquet")
    test_path: str | None = setting(None, "File of held-out comparisons")
    test_size: int = setting(0, "Number of held-out rows of train_path (if no test_path)")
    shuffle_seed: int = setting(0, "Seed of the split by test_size")

    def get_train_and_test_datasets(self) -> tuple[PlacedRows, PlacedRows | None]:
        """Reads the files without parsing the rows."""
        if self.test_path is not None and self.test_size:
            raise ConfigurationError(
                f"test_size: got {self.test_size} with test_path={self.test_path}, expected one of "
                "them: both define the held-out part"
            )
        rows = read_comparison_rows(self.train_path)
        if self.test_path is not None:
            return rows, read_comparison_rows(self.test_path)
        mask = held_out_mask(
            len(rows), self.test_size, self.shuffle_seed, self.train_path, "comparisons"
        )
        return rows.take(~mask), rows.take(mask) if self.test_size else None

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison | None:
        """Parses a row; returns None if two dialogues have no common prompt."""
        return comparison_of_row(example)


ToData: TypeAlias = "Callable[[LabeledComparison], list[tinker.Datum] | str]"
"""Renders a comparison as datums, or returns the reason to skip it."""


class ComparisonDataset(SupervisedDatasetFromHFDataset):
    """Batches of ``batch_size`` comparisons as datums.

    ``dropped`` has the comparisons skipped by the builder or, once rendered, by ``to_data``.
    """

    def __init__(self, comparisons: ComparisonSet, batch_size: int, to_data: ToData) -> None:
        self.dropped = Dropped(comparisons.dropped)

        def data_of(numbered: tuple[int, LabeledComparison]) -> list[tinker.Datum]:
            data = to_data(numbered[1])
            if isinstance(data, str):
                # A key per comparison, so that it counts once in all epochs.
                self.dropped[("rendered", numbered[0])] = data
                return []
            return data

        super().__init__(list(enumerate(comparisons.usable)), batch_size, flatmap_fn=data_of)
        # A missing image must not stop a run in the middle of an epoch.
        for i, labeled in enumerate(comparisons.usable):
            one = labeled.comparison
            if has_images([*one.prompt_conversation, *one.completion_A, *one.completion_B]):
                with data_error(self._where(i)):
                    to_data(labeled)

    def _where(self, number: int) -> str:
        return self.hf_dataset[number][1].place or super()._where(number)

    @property
    def num_dropped(self) -> int:
        """Number of comparisons skipped so far; ``dropped`` has the reasons."""
        return len(self.dropped)

    def report(self) -> list[str]:
        """Returns a line about the comparisons skipped so far, if any."""
        return [self.dropped.describe()] if self.dropped else []


@chz.chz
class ChatDatasetBuilderFromComparisons(ChatDatasetBuilder):
    """Builds training data for a reward model: comparison as prompt, label as answer.

    Ties are trained with the label Tie.
    """

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="Source of the comparisons")
    swap: bool = setting(
        False, "Train each comparison in both orders; False: in one random order (swap_seed)"
    )
    swap_seed: int = setting(0, "Seed of the random orders")

    @cached_property
    def comparison_renderer(self) -> ComparisonRenderer:
        """Renders comparisons in the chat format of ``common_config``."""
        return ComparisonRendererFromChatRenderer(self.renderer)

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads the comparisons and samples the order of each."""
        self.common_config.check()
        train, test = self.comparison_builder.comparison_sets
        batch_size = self.common_config.batch_size
        train_set = self._dataset(train, batch_size)
        if test is None:
            return train_set, None
        return train_set, self._dataset(test, min(batch_size, len(test.usable)))

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the first ``n`` held-out comparisons as conversations."""
        _, test = self.comparison_builder.comparison_sets
        renderer = self.comparison_renderer
        if test is None or not isinstance(renderer, ComparisonRendererFromChatRenderer):
            return []
        return [renderer.comparison_to_convo(c.comparison) for c in test.usable[:n]]

    def _dataset(self, comparisons: ComparisonSet, batch_size: int) -> ComparisonDataset:
        # Files have the chosen answer as A. With a random order, the model cannot learn the
        # position instead of the answers.
        swapped = np.random.default_rng(self.swap_seed).random(len(comparisons.usable)) < 0.5
        ordered = [c.swap() if s else c for c, s in zip(comparisons.usable, swapped, strict=True)]
        both = self.swap or self.comparison_builder.swap
        limit = self.common_config.max_length

        def to_data(labeled: LabeledComparison) -> list[tinker.Datum] | str:
            data: list[tinker.Datum] = []
            for one in [labeled, labeled.swap()] if both else [labeled]:
                model_input, weights = self.comparison_renderer.to_model_input_weights(one)
                # Do not truncate: the label is at the end and would be lost.
                if limit is not None and model_input.length > limit:
                    return SkipReason.LONG_COMPARISON
                data.append(datum_from_model_input_weights(model_input, weights))
            return data

        return ComparisonDataset(ComparisonSet(ordered, comparisons.dropped), batch_size, to_data)
