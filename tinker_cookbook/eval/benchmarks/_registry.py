"""Benchmarks by name."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._types import BenchmarkBuilder
from tinker_cookbook.exceptions import BenchmarkNotFoundError, nearest_sentence

REGISTRY: dict[str, BenchmarkBuilder] = {}
"""Name -> benchmark. ``register`` adds to it."""


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
        raise BenchmarkNotFoundError(
            f"tasks: got {benchmark!r}, which is no benchmark{hint} "
            f"Known: {', '.join(sorted(REGISTRY))}"
        )
    return REGISTRY[benchmark]
