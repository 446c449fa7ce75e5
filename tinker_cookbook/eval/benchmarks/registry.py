"""Benchmarks by name, and their runs on a sampling client."""

from __future__ import annotations

import importlib

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.eval.run.runner import check_requirements, evaluate
from tinker_cookbook.eval.run.sources import RendererSource
from tinker_cookbook.eval.run.types import BenchmarkBuilder, BenchmarkConfig, BenchmarkResult
from tinker_cookbook.exceptions import (
    BenchmarkNotFoundError,
    ConfigurationError,
    nearest_sentence,
)
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel

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


async def run_benchmark(
    benchmark: BenchmarkBuilder | str,
    sampling_client: SamplingClient,
    renderer: Renderer,
    config: BenchmarkConfig = BenchmarkConfig(),  # noqa: B008  (as in the official signature)
) -> BenchmarkResult:
    """Runs one benchmark, by name or as an object.

    With ``config.save_dir`` each answer is stored when it is done. The next run with the same
    model, prompt and sampling settings reuses stored answers, retries errors, and regrades answers
    of an earlier grader version.

    Raises:
        BenchmarkNotFoundError: there is no benchmark with this name.
        ConfigurationError: the benchmark needs a judge or a sandbox, or another run uses the
            folder.
        EvalError: the first requests all fail.
    """
    source = await RendererSource.open(sampling_client, renderer, config)
    return await evaluate(find_benchmark(benchmark), source, config)


async def run_benchmarks(
    names: list[str],
    sampling_client: SamplingClient,
    renderer: Renderer,
    config: BenchmarkConfig = BenchmarkConfig(),  # noqa: B008  (as in the official signature)
    parallel: bool = True,
) -> dict[str, BenchmarkResult]:
    """Runs benchmarks, all at once or one after the other, and writes ``summary.json``.

    Raises:
        EvalError: as for ``run_benchmark``. Answers of other benchmarks are stored.
    """
    builders = {name: find_benchmark(name) for name in names}
    for builder in builders.values():
        check_requirements(builder, config)
    source = await RendererSource.open(sampling_client, renderer, config)
    runs = [evaluate(builder, source, config) for builder in builders.values()]
    found = await gather_or_cancel(runs) if parallel else [await run for run in runs]
    return dict(zip(builders, found, strict=True))
