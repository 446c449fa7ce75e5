"""Evaluation of models: benchmarks, and evaluators for training loops."""

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
    from tinker_cookbook.stores.eval_store import EvalStore, RunMetadata

__all__ = [
    "REGISTRY",
    "BenchmarkBuilder",
    "BenchmarkConfig",
    "BenchmarkEvaluator",
    "BenchmarkResult",
    "EvalStore",
    "Evaluator",
    "EvaluatorBuilder",
    "RunMetadata",
    "SamplingClientEvaluator",
    "SamplingClientEvaluatorBuilder",
    "StoredTrajectory",
    "TrainingClientEvaluator",
    "print_trajectory",
    "register",
    "run_benchmark",
    "run_benchmarks",
]

_BENCHMARKS = "tinker_cookbook.eval.benchmarks"

# Imported lazily: loops need only the evaluators, and benchmarks import RL environments.
__getattr__ = lazy_exports(
    __name__,
    {
        "BenchmarkEvaluator": "tinker_cookbook.eval.benchmark_evaluator",
        "EvalStore": "tinker_cookbook.stores.eval_store",
        "RunMetadata": "tinker_cookbook.stores.eval_store",
        "REGISTRY": _BENCHMARKS,
        "BenchmarkBuilder": _BENCHMARKS,
        "BenchmarkConfig": _BENCHMARKS,
        "BenchmarkResult": _BENCHMARKS,
        "StoredTrajectory": _BENCHMARKS,
        "print_trajectory": _BENCHMARKS,
        "register": _BENCHMARKS,
        "run_benchmark": _BENCHMARKS,
        "run_benchmarks": _BENCHMARKS,
    },
)
