"""Decisions: probabilities of given choices from one scoring call, and training of them."""

from tinker_cookbook.recipes.decisions.decision import (
    ChoiceRenderer,
    ChoiceRendering,
    Decision,
    DecisionRenderer,
    DecisionRendering,
    PrefixedChoiceRenderer,
    sample_decision,
)
from tinker_cookbook.recipes.decisions.train import (
    ProbabilityLossFn,
    decision_choice_datums,
    decision_dist_datums,
    probability_loss,
)

__all__ = [
    "ChoiceRenderer",
    "ChoiceRendering",
    "Decision",
    "DecisionRenderer",
    "DecisionRendering",
    "PrefixedChoiceRenderer",
    "ProbabilityLossFn",
    "decision_choice_datums",
    "decision_dist_datums",
    "probability_loss",
    "sample_decision",
]
