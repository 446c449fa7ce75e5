"""Supervised fine-tuning: datasets, datums, evaluators, and the loop that trains on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.supervised.common import (
        compute_bpb,
        compute_mean_nll,
        datum_from_model_input_weights,
    )
    from tinker_cookbook.supervised.conversation_file import FromConversationFileBuilder
    from tinker_cookbook.supervised.data import (
        StreamingSupervisedDatasetFromHFDataset,
        SupervisedDatasetFromHFDataset,
        conversation_to_datum,
    )
    from tinker_cookbook.supervised.interleaved import (
        HFDatasetSource,
        InterleavedChatDatasetBuilder,
    )
    from tinker_cookbook.supervised.types import (
        ChatDatasetBuilder,
        ChatDatasetBuilderCommonConfig,
        SupervisedDataset,
        SupervisedDatasetBuilder,
    )

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

__getattr__ = lazy_exports(
    __name__,
    {
        "ChatDatasetBuilder": "tinker_cookbook.supervised.types",
        "ChatDatasetBuilderCommonConfig": "tinker_cookbook.supervised.types",
        "FromConversationFileBuilder": "tinker_cookbook.supervised.conversation_file",
        "HFDatasetSource": "tinker_cookbook.supervised.interleaved",
        "InterleavedChatDatasetBuilder": "tinker_cookbook.supervised.interleaved",
        "StreamingSupervisedDatasetFromHFDataset": "tinker_cookbook.supervised.data",
        "SupervisedDataset": "tinker_cookbook.supervised.types",
        "SupervisedDatasetBuilder": "tinker_cookbook.supervised.types",
        "SupervisedDatasetFromHFDataset": "tinker_cookbook.supervised.data",
        "compute_bpb": "tinker_cookbook.supervised.common",
        "compute_mean_nll": "tinker_cookbook.supervised.common",
        "conversation_to_datum": "tinker_cookbook.supervised.data",
        "datum_from_model_input_weights": "tinker_cookbook.supervised.common",
    },
)
