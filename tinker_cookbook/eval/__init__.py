"""Evaluation of models: benchmarks, and evaluators for training loops.

``run`` samples, grades and stores answers, ``benchmarks`` has the problems and their graders,
``statistics`` intervals and tests, ``inspect_bridge`` runs tasks of Inspect AI.
"""

# Names are lazy, so that checkers do not see them.
# ruff: noqa: F401
# pyright: reportUnsupportedDunderAll=false
from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_cookbook.eval.evaluators import (
    Evaluator,
    EvaluatorBuilder,
    SamplingClientEvaluator,
    SamplingClientEvaluatorBuilder,
    TrainingClientEvaluator,
)
from tinker_cookbook.utils.imports import lazy_exports

if TYPE_CHECKING:
    from tinker_cookbook.eval.benchmark_evaluator import BenchmarkEvaluator
    from tinker_cookbook.eval.benchmarks import (
        REGISTRY,
        BenchmarkBuilder,
        BenchmarkConfig,
        BenchmarkResult,
        StoredTrajectory,
        print_trajectory,
        register,
        run_benchmark,
        run_benchmarks,
    )

_LAZY = {
    "BenchmarkEvaluator": "tinker_cookbook.eval.benchmark_evaluator",
    **dict.fromkeys(
        (
            *("REGISTRY", "BenchmarkBuilder", "BenchmarkConfig", "BenchmarkResult"),
            *("StoredTrajectory", "print_trajectory", "register"),
            *("run_benchmark", "run_benchmarks"),
        ),
        "tinker_cookbook.eval.benchmarks",
    ),
}
# Imported lazily: loops need only the evaluators, and benchmarks import RL environments.
__getattr__ = lazy_exports(__name__, _LAZY)
__all__ = [
    "EvalStore",
    "Evaluator",
    "EvaluatorBuilder",
    "RunMetadata",
    "SamplingClientEvaluator",
    "SamplingClientEvaluatorBuilder",
    "TrainingClientEvaluator",
    *_LAZY,
]
