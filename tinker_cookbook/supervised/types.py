"""Interfaces of datasets of datums, and the configs of their builders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import chz

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    TrainOnWhat,
    check_renderer_name,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer
from tinker_cookbook.training.config import at_least
from tinker_cookbook.utils.imports import tinker


class EmptyBatchError(DataValidationError):
    """Batch without any datum."""


class SupervisedDataset(ABC):
    """Batches of datums, in an order that depends on the seed of the epoch."""

    @property
    def num_dropped(self) -> int:
        """Number of datums dropped so far because they have no trained token."""
        return 0

    def report(self) -> list[str]:
        """Returns a line that counts dropped examples; empty if none was dropped."""
        if not self.num_dropped:
            return []
        return [f"{self.num_dropped} examples had no token to train and were dropped"]

    def data_sources(self) -> dict[str, Any]:
        """Returns the rows, or the datasets, that the batches are made of, by name.

        A run records their number and a digest, and a resumed run refuses others. A single part
        has the name "". Empty (the default): only the number of batches is compared.
        """
        return {}

    @abstractmethod
    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Returns the batch at ``index`` (0 to ``len`` - 1) of the current epoch, never empty.

        Raises EmptyBatchError for a batch without any datum. Loops skip such a batch, and a batch
        with only zero weights (``data.trained_batch``).
        """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches in an epoch; the last one may be smaller."""

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffles the data for an epoch; the order depends on ``seed`` and the data only."""


@chz.chz
class SupervisedDatasetBuilder:
    """Config of a dataset: training data and optional test data."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Returns the training set and the test set; raises DataError for invalid data."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns up to ``n`` held-out prompts; loops show answers to them."""
        return []


@chz.chz
class ChatDatasetBuilderCommonConfig:
    """Settings of all builders of chat data."""

    model_name_for_tokenizer: str = chz.field(doc="Hub name or folder of the tokenizer")
    renderer_name: str = chz.field(doc="Chat format")
    max_length: int | None = chz.field(
        default=None,
        validator=at_least(2, hint=" tokens (one to read and one to predict), or None: no limit"),
        doc="Maximum tokens of an example; None: no limit",
    )
    batch_size: int = chz.field(validator=at_least(1), doc="Conversations in a batch")
    train_on_what: TrainOnWhat | None = chz.field(
        default=None, doc="Messages to train on; None: all assistant messages"
    )

    def check(self) -> None:
        """Raises ConfigurationError for an unknown renderer; needs no tokenizer."""
        check_renderer_name(self.renderer_name)


@chz.chz
class ChatDatasetBuilder(SupervisedDatasetBuilder):
    """Builder of chat data, with its tokenizer and renderer."""

    common_config: ChatDatasetBuilderCommonConfig = chz.field(doc="Tokenizer, format, batch size")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer, loaded once."""
        return get_tokenizer(self.common_config.model_name_for_tokenizer)

    @cached_property
    def renderer(self) -> Renderer:
        """Renderer, created once."""
        return get_renderer(self.common_config.renderer_name, self.tokenizer)

    @property
    def train_on_what(self) -> TrainOnWhat:
        """Setting ``train_on_what``, by default all assistant messages."""
        return self.common_config.train_on_what or TrainOnWhat.ALL_ASSISTANT_MESSAGES
