"""Benchmarks by name."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._types import BenchmarkBuilder
from tinker_cookbook.exceptions import BenchmarkNotFoundError, nearest_sentence

REGISTRY: dict[str, BenchmarkBuilder] = {}
"""Name -> benchmark. ``register`` adds to it."""

# Names of the official package that have no benchmark here.
_NOT_AVAILABLE = (
    "arena_hard",
    "bfcl",
    "hmmt_feb_2025",
    "hmmt_nov_2025",
    "livecodebench",
    "longbench",
    "swe_bench",
    "tau2_bench",
    "terminal_bench",
)


def register(builder: BenchmarkBuilder) -> BenchmarkBuilder:
    """Makes ``builder`` available under its name, in place of one with the same name."""
    REGISTRY[builder.name] = builder
    return builder


def find_benchmark(benchmark: BenchmarkBuilder | str) -> BenchmarkBuilder:
    """Returns the benchmark with this name; an object is returned as it is.

    Raises:
        BenchmarkNotFoundError: no benchmark has this name; the message has the nearest one.
    """
    if not isinstance(benchmark, str):
        return benchmark
    if benchmark not in REGISTRY:
        hint = nearest_sentence(benchmark, REGISTRY)
        problem = f"is no benchmark{hint}"
        if benchmark in _NOT_AVAILABLE:
            problem = "is a benchmark of the official package that is not available here."
        # The subjects of a benchmark are too many to list.
        wholes = [name for name, builder in REGISTRY.items() if builder.part_of is None]
        parts = sorted({f"{builder.part_of}_…" for builder in REGISTRY.values() if builder.part_of})
        raise BenchmarkNotFoundError(
            f"tasks: got {benchmark!r}, which {problem} Known: {', '.join(sorted(wholes))}, and "
            f"single subjects or tasks as {', '.join(parts)}"
        )
    return REGISTRY[benchmark]
