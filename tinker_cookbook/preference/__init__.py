"""Preference learning: comparisons, reward models and direct preference optimization (DPO).

Read it in this order: ``types`` (comparisons, their labels, and models that judge them),
``preference_datasets`` (comparisons from files, and as training data of a reward model),
``dpo_datasets`` (as pairs), ``dpo_loss`` and ``train_dpo`` (the loss and its loop).
"""

from __future__ import annotations

from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison

__all__ = ["Comparison", "ComparisonDatasetBuilder", "LabeledComparison"]
