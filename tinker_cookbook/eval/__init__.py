"""Evaluators that training loops call, and evaluations of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.eval.evaluators import (
        Evaluator,
        EvaluatorBuilder,
        SamplingClientEvaluator,
        SamplingClientEvaluatorBuilder,
        TrainingClientEvaluator,
    )

__all__ = [
    "Evaluator",
    "EvaluatorBuilder",
    "SamplingClientEvaluator",
    "SamplingClientEvaluatorBuilder",
    "TrainingClientEvaluator",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "Evaluator": "tinker_cookbook.eval.evaluators",
        "EvaluatorBuilder": "tinker_cookbook.eval.evaluators",
        "SamplingClientEvaluator": "tinker_cookbook.eval.evaluators",
        "SamplingClientEvaluatorBuilder": "tinker_cookbook.eval.evaluators",
        "TrainingClientEvaluator": "tinker_cookbook.eval.evaluators",
    },
)
