"""What MBPP and HumanEval share: their programs may run only in a sandbox."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, Grade
from tinker_cookbook.exceptions import ConfigurationError


class CodeBenchmark(ExampleBenchmark):
    """Benchmark whose answers are programs. Data can be loaded; answers cannot be graded yet."""

    requires_sandbox = True

    def examples(self, config: BenchmarkConfig) -> list[Example]:
        """Raises ConfigurationError before anything is sampled; see ``load_examples``."""
        raise ConfigurationError(self._refusal())

    def grade(self, response: str, example: Example) -> Grade:
        """Raises ConfigurationError: a program of a model must not run without a sandbox."""
        raise ConfigurationError(self._refusal())

    def _refusal(self) -> str:
        return (
            f"tasks: got {self.name!r}, which runs programs that a model wrote. This release has "
            "no sandbox to run them in, so the task is refused; a later release will run it. "
            "Expected a task without programs, for example gsm8k, mmlu or ifeval"
        )
