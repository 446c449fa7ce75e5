"""Benchmarks by name."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._types import BenchmarkBuilder
from tinker_cookbook.exceptions import BenchmarkNotFoundError, nearest_sentence

REGISTRY: dict[str, BenchmarkBuilder] = {}
"""Name -> benchmark. ``register`` adds to it."""

# Benchmarks of the official package that are not available here.
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
    """Registers ``builder`` under its name; replaces a benchmark with the same name."""
    REGISTRY[builder.name] = builder
    return builder


def find_benchmark(benchmark: BenchmarkBuilder | str) -> BenchmarkBuilder:
    """Returns the benchmark with this name; returns an object unchanged.

    Raises:
        BenchmarkNotFoundError: there is no benchmark with this name; the message has the most
            similar one.
    """
    if not isinstance(benchmark, str):
        return benchmark
    if benchmark not in REGISTRY:
        hint = nearest_sentence(benchmark, REGISTRY)
        problem = f"is not a benchmark{hint}"
        if benchmark in _NOT_AVAILABLE:
            problem = "is a benchmark of the official package that is not available here."
        # A benchmark has too many subjects to list.
        wholes = [name for name, builder in REGISTRY.items() if builder.part_of is None]
        parts = sorted({f"{builder.part_of}_…" for builder in REGISTRY.values() if builder.part_of})
        raise BenchmarkNotFoundError(
            f"tasks: got {benchmark!r}, which {problem} Known: {', '.join(sorted(wholes))}, and "
            f"single subjects or tasks as {', '.join(parts)}"
        )
    return REGISTRY[benchmark]
