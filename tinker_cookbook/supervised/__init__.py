"""Supervised fine-tuning: datasets, datums, evaluators, and the loop that trains on them."""

from __future__ import annotations

from tinker_cookbook.supervised.common import (
    compute_bpb,
    compute_mean_nll,
    datum_from_model_input_weights,
)
from tinker_cookbook.supervised.data import (
    FromConversationFileBuilder,
    HFDatasetSource,
    InterleavedChatDatasetBuilder,
    StreamingSupervisedDatasetFromHFDataset,
    SupervisedDatasetFromHFDataset,
    conversation_to_datum,
)
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from tinker_cookbook.utils.imports import alias_modules

__all__ = [
    "ChatDatasetBuilder",
    "ChatDatasetBuilderCommonConfig",
    "FromConversationFileBuilder",
    "HFDatasetSource",
    "InterleavedChatDatasetBuilder",
    "StreamingSupervisedDatasetFromHFDataset",
    "SupervisedDataset",
    "SupervisedDatasetBuilder",
    "SupervisedDatasetFromHFDataset",
    "compute_bpb",
    "compute_mean_nll",
    "conversation_to_datum",
    "datum_from_model_input_weights",
]

# The path of the loop in the documentation of Tinker.
alias_modules({f"{__name__}.train_cli": f"{__name__}.train"})
