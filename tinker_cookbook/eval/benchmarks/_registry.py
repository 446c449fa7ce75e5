"""Benchmarks by name."""

from __future__ import annotations

import importlib

from tinker_cookbook.eval.benchmarks._types import BenchmarkBuilder
from tinker_cookbook.exceptions import (
    BenchmarkNotFoundError,
    ConfigurationError,
    nearest_sentence,
)

REGISTRY: dict[str, BenchmarkBuilder] = {}
"""Name -> benchmark. ``register`` adds to it."""

# Benchmarks of the official package that are not available here.
_NOT_AVAILABLE = (
    "arena_hard",
    "bfcl",
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
    """Returns the benchmark with this name, or an object of a class ``module:Class``; returns an
    object unchanged.

    Raises:
        ConfigurationError: ``module:Class`` is not a benchmark.
        BenchmarkNotFoundError: there is no benchmark with this name; the message has the most
            similar one.
    """
    if not isinstance(benchmark, str):
        return benchmark
    if ":" in benchmark:
        return _build(benchmark)
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
            f"single subjects or tasks as {', '.join(parts)}; a file of questions such as "
            "questions.jsonl, or module:Class"
        )
    return REGISTRY[benchmark]


def _build(name: str) -> BenchmarkBuilder:
    """Returns an object of the class that ``module:Class`` names."""
    module, _, attribute = name.partition(":")
    expected = (
        "expected module:Class, a subclass of tinker_cookbook.eval.benchmarks.ExampleBenchmark or "
        "BenchmarkBuilder in a module that Python can import from here"
    )
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        # A module that the user's module needs is another problem than a wrong name.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"tasks: got {name!r} ({error}), {expected}") from error
    if not (isinstance(found, type) and issubclass(found, BenchmarkBuilder)):
        got = "which the module does not have" if found is None else "which is not one"
        raise ConfigurationError(f"tasks: got {name!r}, {got}; {expected}")
    try:
        built = found()
    except TypeError as error:
        raise ConfigurationError(
            f"tasks: got {name!r}, which cannot be created without arguments ({error}); expected a "
            "class without required arguments and abstract methods"
        ) from error
    if not getattr(built, "name", None):
        raise ConfigurationError(
            f"tasks: got {name!r}, which has no name; expected name = 'NAME' in the class"
        )
    return built
