"""Benchmarks: questions with graders, run on a checkpoint, a base model or an API."""

from tinker_cookbook.eval.benchmarks.registry import (
    REGISTRY,
    find_benchmark,
    register,
    run_benchmark,
    run_benchmarks,
)
from tinker_cookbook.eval.run.answers import (
    load_result,
    load_summary,
    load_trajectories,
    print_trajectory,
    regrade_trajectories,
)
from tinker_cookbook.eval.run.examples import Example, ExampleBenchmark, Grade
from tinker_cookbook.eval.run.types import (
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
from tinker_cookbook.leaves import find_leaf

# These modules register their benchmarks when they are imported, so they come last.
from tinker_cookbook.eval.benchmarks import (  # noqa: F401  # isort: skip
    bbh,
    choices,
    instructions,
    mathematics,
    mt_bench,
)

find_leaf("eval.benchmarks.programs")  # needs the sandbox, which is a leaf

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
