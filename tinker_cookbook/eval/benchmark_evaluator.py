"""A benchmark as an evaluator of training loops."""

from __future__ import annotations

from typing import Any

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.eval.benchmarks import (
    BenchmarkBuilder,
    BenchmarkConfig,
    find_benchmark,
    run_benchmark,
)
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.renderers import Renderer


class BenchmarkEvaluator(SamplingClientEvaluator):
    """Runs a benchmark on the current weights of a training run.

    Metrics are ``eval/NAME/score``, ``num_correct``, ``num_examples``, ``num_errors``,
    ``num_truncated``, ``ci_low``, ``ci_high``, ``pass@K``, and further metrics of the benchmark.

    Args:
        benchmark_name: Name in the registry, or a benchmark.
        renderer: Renderer of the model's chat format.
        max_examples: Number of examples, from the first; ``None``: all.
        max_tokens: Maximum tokens of an answer, capped by the remaining context.
        temperature: 0 is greedy.
        settings: Other fields of ``BenchmarkConfig``, such as ``num_samples`` or ``data_path``.

    Raises:
        BenchmarkNotFoundError: there is no benchmark with this name.
    """

    def __init__(
        self,
        benchmark_name: str | BenchmarkBuilder,
        renderer: Renderer,
        max_examples: int | None = 100,
        max_tokens: int = 32768,
        temperature: float = 0.6,
        **settings: Any,
    ) -> None:
        self._benchmark = find_benchmark(benchmark_name)
        self._renderer = renderer
        self._config = BenchmarkConfig(
            max_examples=max_examples, max_tokens=max_tokens, temperature=temperature, **settings
        )

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns the metrics of the client's weights."""
        result = await run_benchmark(self._benchmark, sampling_client, self._renderer, self._config)
        counts = ("score", "num_correct", "num_examples", "num_errors", "num_truncated")
        values = {name: float(getattr(result, name)) for name in counts}
        values |= {name: float(value) for name, value in result.metrics.items()}
        values |= {f"pass@{k}": value for k, value in result.pass_at_k.items()}
        return {f"eval/{self._benchmark.name}/{name}": value for name, value in values.items()}
