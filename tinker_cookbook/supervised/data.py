"""Datasets for supervised training: the public names of rows, conversation files and mixtures."""

from __future__ import annotations

from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
from tinker_cookbook.supervised.mixtures import HFDatasetSource, InterleavedChatDatasetBuilder
from tinker_cookbook.supervised.row_datasets import (
    Conversation,
    FlatmapFn,
    MapFn,
    Rows,
    StreamingSupervisedDatasetFromHFDataset,
    SupervisedDatasetFromHFDataset,
    conversation_to_data,
    conversation_to_datum,
    trained_batch,
)
from tinker_cookbook.utils.imports import lazy_exports

__all__ = [
    "Conversation",
    "FlatmapFn",
    "FromConversationFileBuilder",
    "HFDatasetSource",
    "InterleavedChatDatasetBuilder",
    "MapFn",
    "Rows",
    "StreamingSupervisedDatasetFromHFDataset",
    "SupervisedDatasetFromHFDataset",
    "conversation_to_data",
    "conversation_to_datum",
    "trained_batch",
]

# ``supervised.data.datasets`` is the Hugging Face library, imported at first use.
__getattr__ = lazy_exports(__name__, {"datasets": "datasets"})
