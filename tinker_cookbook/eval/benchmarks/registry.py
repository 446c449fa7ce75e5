"""Benchmarks by name, and their runs on a sampling client."""

from __future__ import annotations

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
from tinker_cookbook.utils.imports import lookup_func

REGISTRY: dict[str, BenchmarkBuilder] = {}
"""Name -> benchmark. ``register`` adds to it."""


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
        raise BenchmarkNotFoundError(
            f"tasks: got {benchmark!r}, which is not a benchmark"
            f"{nearest_sentence(benchmark, REGISTRY)} Known: {task_names()}; a file of questions "
            "such as questions.jsonl, or module:Class"
        )
    return REGISTRY[benchmark]


def task_names() -> str:
    """Returns the names of all benchmarks, with one entry for all parts of the same one."""
    wholes = sorted(name for name, builder in REGISTRY.items() if builder.part_of is None)
    parts = sorted({f"{builder.part_of}_…" for builder in REGISTRY.values() if builder.part_of})
    return ", ".join([*wholes, *parts])


def _build(name: str) -> BenchmarkBuilder:
    """Returns an object of the class that ``module:Class`` names."""
    try:
        built = lookup_func(name)()
    except (ImportError, AttributeError, TypeError) as error:
        problem, cause = str(error), error
    else:
        if isinstance(built, BenchmarkBuilder):
            return built
        problem, cause = "not a benchmark", None
    raise ConfigurationError(
        f"tasks: got {name!r} ({problem}), expected module:Class, a subclass of ExampleBenchmark "
        "or BenchmarkBuilder of tinker_cookbook.eval.benchmarks without required arguments, in a "
        "module that Python can import from here"
    ) from cause


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
