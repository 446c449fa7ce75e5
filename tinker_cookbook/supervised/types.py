"""Datasets of datums, and the configs that build them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    TrainOnWhat,
    check_renderer_name,
    get_renderer,
)
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer

if TYPE_CHECKING:
    import tinker


class EmptyBatchError(DataValidationError):
    """Nothing of a batch can be trained: all of its examples were dropped."""


class SupervisedDataset(ABC):
    """Batches of datums in an order that the epoch's seed decides."""

    @property
    def num_dropped(self) -> int:
        """Datums left out so far because they have no token to train on."""
        return 0

    def report(self) -> list[str]:
        """Returns a line that counts dropped examples; empty if none was dropped."""
        if not self.num_dropped:
            return []
        return [f"{self.num_dropped} examples had no token to train and were dropped"]

    @abstractmethod
    def get_batch(self, index: int) -> list[tinker.Datum]:
        """The batch at ``index`` (0 to ``len`` - 1) of the current epoch.

        Never empty: raises EmptyBatchError where nothing of the batch is left. The loops pass over
        such a batch, and over one of which all weights are 0 (``data.trained_batch``).
        """

    @abstractmethod
    def __len__(self) -> int:
        """Batches in an epoch; the last one may be smaller."""

    def set_epoch(self, seed: int = 0) -> None:
        """Orders the data for an epoch: a function of ``seed`` and the data, of nothing else."""


@chz.chz
class SupervisedDatasetBuilder:
    """A config that builds the training data and, if there is any, the test data."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads and prepares the data; raises DataError where it cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Up to ``n`` conversations of the held-out part, each without its last answer.

        A loop prints sampled answers to them before and after training.
        """
        return []


@chz.chz
class ChatDatasetBuilderCommonConfig:
    """Settings that all builders of chat data share."""

    model_name_for_tokenizer: str = chz.field(doc="Hub name or folder of the tokenizer")
    renderer_name: str = chz.field(doc="Chat format")
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which examples are cut; None: no limit"
    )
    batch_size: int = chz.field(doc="Conversations a step")
    train_on_what: TrainOnWhat | None = chz.field(
        default=None, doc="Which messages are trained on; None: all assistant messages"
    )

    def check(self) -> None:
        """Raises ConfigurationError for a value that cannot work; loads nothing."""
        check_renderer_name(self.renderer_name)
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size: got {self.batch_size}, expected at least 1")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigurationError(
                f"max_length: got {self.max_length}, expected at least 2 tokens (one to read and "
                "one to predict), or None for no limit"
            )


@chz.chz
class ChatDatasetBuilder(SupervisedDatasetBuilder):
    """A builder of conversations, with their tokenizer and renderer."""

    common_config: ChatDatasetBuilderCommonConfig = chz.field(doc="Tokenizer, format, batch size")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded once."""
        return get_tokenizer(self.common_config.model_name_for_tokenizer)

    @cached_property
    def renderer(self) -> Renderer:
        """The renderer, made once."""
        return get_renderer(self.common_config.renderer_name, self.tokenizer)

    @property
    def train_on_what(self) -> TrainOnWhat:
        """The setting, or its default: all assistant messages."""
        return self.common_config.train_on_what or TrainOnWhat.ALL_ASSISTANT_MESSAGES
