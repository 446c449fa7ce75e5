"""Preference learning: comparisons, reward models and direct preference optimization (DPO).

Modules in reading order: ``comparison`` (comparisons, labels, and their rendering),
``preference_datasets`` (comparisons from files, training data of a reward model),
``dpo_datasets`` (pairs), ``dpo_loss`` and ``train_dpo`` (the loss and its loop).
"""

from __future__ import annotations

from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison

__all__ = ["Comparison", "ComparisonDatasetBuilder", "LabeledComparison"]
