r"""MATH-500: 500 competition problems with expressions as answers (Lightman et al. 2023).

The content of the last ``\boxed{…}`` is compared by ``tinker_cookbook.grading.mathematics``.
"""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._common import build_messages, make_example_id
from tinker_cookbook.eval.benchmarks._data import Source, column, mean_by_key, with_unique_ids
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig, BenchmarkResult, Metrics
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, Grade
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.grading.texts import extract_boxed
from tinker_cookbook.rl.envs.grading import grade_response
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)


class MATH500BenchmarkBuilder(ExampleBenchmark):
    """MATH-500, with the score of each level."""

    name = "math500"
    source = Source(
        "HuggingFaceH4/MATH-500",
        "test",
        folders=("math500", "MATH-500", "math"),
        files=("math500.jsonl", "test.jsonl"),
    )
    grader_version = "2"
    recommended_system_prompt = "Put your final answer in \\boxed{}."

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the problems; the gold answers are the complete solutions."""
        examples: list[Example] = []
        for row in self.source.load(config.data_path):
            problem = column(row, "problem", where=self.name)
            solution = str(row.get("solution") or "")
            answer = row.get("answer")
            if answer is None:
                answer = extract_boxed(solution)
            if answer is None or not str(answer).strip():
                raise DataFormatError(
                    f"{self.name}: answer: got {answer!r} for {problem[:80]!r}, expected text, or "
                    "a solution with \\boxed{…}"
                )
            examples.append(
                Example(
                    example_id=str(row.get("unique_id") or make_example_id(self.name, problem)),
                    messages=build_messages(problem),
                    expected=str(answer),
                    gold=solution if "\\boxed" in solution else f"\\boxed{{{answer}}}",
                    logs={"input": problem, "expected": str(answer), "level": row.get("level")},
                )
            )
        return with_unique_ids(examples)

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the boxed answer; without a box ``math_verify`` searches the response."""
        right, extracted = grade_response(response, example.expected)
        level = example.logs.get("level")
        metrics: Metrics = {} if level is None else {f"level_{level}/accuracy": float(right)}
        return Grade(float(right), metrics, {"extracted": extracted})

    def aggregate(self, rewards: list[float], metrics_list: list[Metrics]) -> BenchmarkResult:
        """Adds the score of each level of difficulty."""
        result = super().aggregate(rewards, metrics_list)
        result.metrics |= mean_by_key(metrics_list, lambda name: name.startswith("level_"))
        return result


register(MATH500BenchmarkBuilder())
