"""Public types of preference learning."""

from __future__ import annotations

from tinker_cookbook.preference.comparison import (
    LABELS,
    Comparison,
    ComparisonRenderer,
    ComparisonRendererFromChatRenderer,
    Label,
    LabeledComparison,
)
from tinker_cookbook.preference.preference_model import (
    PreferenceModel,
    PreferenceModelBuilder,
    PreferenceModelBuilderFromChatRenderer,
    PreferenceModelFromChatRenderer,
)

__all__ = [
    "LABELS",
    "Comparison",
    "ComparisonRenderer",
    "ComparisonRendererFromChatRenderer",
    "Label",
    "LabeledComparison",
    "PreferenceModel",
    "PreferenceModelBuilder",
    "PreferenceModelBuilderFromChatRenderer",
    "PreferenceModelFromChatRenderer",
]
