"""Chat datasets of the Hub: Tülu 3 and No Robots."""

from __future__ import annotations

from functools import cached_property

import chz
import numpy as np

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import Message, TrainOnWhat
from tinker_cookbook.supervised.conversation_file import (
    ChatDataset,
    ConversationRows,
    prompts_of,
)
from tinker_cookbook.supervised.hf_datasets import NoRobotsBuilder, load_hf_dataset
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

__all__ = ["NoRobotsBuilder", "Tulu3Builder"]

TEST_ROWS = 1024


@chz.chz
class Tulu3Builder(ChatDatasetBuilder):
    """allenai/tulu-3-sft-mixture: 939,000 conversations, of which 1,024 are held out.

    The rows are shuffled by seed 0 and the first 1,024 are the test set, as in the original. By
    default only the last answer of a conversation is trained on.
    """

    path: str = chz.field(default="allenai/tulu-3-sft-mixture", doc="Hub name, or folder of a copy")

    @property
    def train_on_what(self) -> TrainOnWhat:
        """Setting ``train_on_what``, by default the last answer."""
        return self.common_config.train_on_what or TrainOnWhat.LAST_ASSISTANT_MESSAGE

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Returns the training set and the held-out part."""
        self.common_config.check()
        train, test = self._split
        batch_size = self.common_config.batch_size
        return (
            ChatDataset(self, train, batch_size),
            ChatDataset(self, test, min(batch_size, len(test))),
        )

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """Returns the prompts of the first ``n`` held-out conversations."""
        test = self._split[1]
        return prompts_of((test[i] for i in range(len(test))), n)

    @cached_property
    def _split(self) -> tuple[ConversationRows, ConversationRows]:
        rows = load_hf_dataset(self.path, "train")
        if len(rows) <= TEST_ROWS:
            raise DataValidationError(
                f"dataset: {self.path} has {len(rows)} rows, of which tulu3 holds out "
                f"{TEST_ROWS}; expected more. Give a small copy as dataset=FOLDER instead"
            )
        # The order of Dataset.shuffle(seed=0), for tables and for rows of JSON.
        order = np.random.default_rng(0).permutation(len(rows))
        table = ConversationRows(rows, self.path, lambda: self.renderer)
        return table.take(order[TEST_ROWS:]), table.take(order[:TEST_ROWS])
