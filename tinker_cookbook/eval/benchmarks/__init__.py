"""Benchmarks: questions with graders, run on a checkpoint, a base model or an API."""

from tinker_cookbook.eval.benchmarks._files import (
    load_result,
    load_summary,
    load_trajectories,
    print_trajectory,
    regrade_trajectories,
)
from tinker_cookbook.eval.benchmarks._registry import REGISTRY, find_benchmark, register
from tinker_cookbook.eval.benchmarks._runner import run_benchmark, run_benchmarks
from tinker_cookbook.eval.benchmarks._types import (
    BenchmarkBuilder,
    BenchmarkConfig,
    BenchmarkResult,
    BenchmarkResultDict,
    Logs,
    Metrics,
    PassAtKScores,
    StoredTrajectory,
    StoredTrajectoryDict,
    StoredTurn,
    StoredTurnDict,
    TurnRole,
)
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, Grade

# These modules register their benchmarks when they are imported, so they come last.
from tinker_cookbook.eval.benchmarks import (  # noqa: F401  # isort: skip
    aime,
    bbh,
    ceval,
    gpqa,
    gsm8k,
    hmmt,
    humaneval,
    ifbench,
    ifeval,
    math500,
    mbpp,
    mmlu,
    mmlu_pro,
    mmlu_redux,
    mt_bench,
    supergpqa,
)

__all__ = [
    "REGISTRY",
    "BenchmarkBuilder",
    "BenchmarkConfig",
    "BenchmarkResult",
    "BenchmarkResultDict",
    "Example",
    "ExampleBenchmark",
    "Grade",
    "Logs",
    "Metrics",
    "PassAtKScores",
    "StoredTrajectory",
    "StoredTrajectoryDict",
    "StoredTurn",
    "StoredTurnDict",
    "TurnRole",
    "find_benchmark",
    "load_result",
    "load_summary",
    "load_trajectories",
    "print_trajectory",
    "regrade_trajectories",
    "register",
    "run_benchmark",
    "run_benchmarks",
]
