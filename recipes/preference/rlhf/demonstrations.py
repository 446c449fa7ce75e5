"""Stage 1's demonstrations: the answers of the comparisons, good and bad ones alike.

The reward model judges answers like these, so a policy that writes such answers is one that it can
judge. To prefer the good ones is left to stage 3.
"""

from __future__ import annotations

import chz

from tinker_cookbook.preference.comparison import LabeledComparison
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder, chat_dataset
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset


@chz.chz
class AnswersOfComparisonsBuilder(ChatDatasetBuilder):
    """Conversations that end with one answer of a comparison; each comparison gives two."""

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="Where comparisons come from")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Reads the comparisons."""
        self.common_config.check()
        train, test = self.comparison_builder.comparison_sets
        batch_size = self.common_config.batch_size
        train_set = chat_dataset(self, _conversations(train.usable), batch_size)
        if test is None:
            return train_set, None
        held_out = _conversations(test.usable)
        return train_set, chat_dataset(self, held_out, min(batch_size, len(held_out)))

    def held_out_prompts(self, n: int) -> list[list[Message]]:
        """The first ``n`` different held-out prompts."""
        _, test = self.comparison_builder.comparison_sets
        return [] if test is None else test.prompts(n)


@chz.chz
class DemonstrationFileBuilder(FromConversationFileBuilder):
    """Conversations of a file of the user's."""

    @property
    def setting_names(self) -> tuple[str, str]:
        """What this recipe calls the file."""
        return "sft_dataset", "test_path"


def _conversations(comparisons: list[LabeledComparison]) -> list[list[Message]]:
    return [
        [*one.comparison.prompt_conversation, *answer]
        for one in comparisons
        for answer in one.chosen_and_rejected()
    ]
