"""AIME: 30 problems per year with integers from 0 to 999 as answers."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._common import (
    build_messages,
    check_gsm8k,
    extract_gsm8k_answer,
    make_example_id,
)
from tinker_cookbook.eval.benchmarks._data import Source, column, with_unique_ids
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, Grade
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)


class AIMEBenchmarkBuilder(ExampleBenchmark):
    """The two competitions of a year."""

    grader_version = "3"
    recommended_system_prompt = "Put your final answer in \\boxed{}."

    def __init__(self, year: str, benchmark_name: str) -> None:
        self.year, self.name = year, benchmark_name
        self.source = Source(
            f"MathArena/aime_{year}",
            "train",
            folders=("aime", f"aime_{year}", f"aime{year}"),
            files=(f"*{year}*.jsonl", f"*{year}*.json", f"*{year}*.parquet", "data/*.parquet"),
        )

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the problems; the Hub calls their split ``train``."""
        examples: list[Example] = []
        for row in self.source.load(config.data_path):
            problem = column(row, "problem", "question", "Problem", where=self.name)
            answer = str(column(row, "answer", "Answer", "expected_answer", where=self.name))
            if not answer.strip().isdigit():
                raise DataFormatError(
                    f"{self.name}: answer: got {answer!r}, expected an integer from 0 to 999"
                )
            expected = int(answer)
            examples.append(
                Example(
                    example_id=make_example_id(self.name, problem),
                    messages=build_messages(problem),
                    expected=expected,
                    gold=f"\\boxed{{{answer}}}",
                    logs={"input": problem, "expected": str(expected)},
                )
            )
        return with_unique_ids(examples)

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the integer; ``073`` is 73."""
        # No other number is an answer in this competition.
        right = 0 <= example.expected <= 999 and check_gsm8k(response, str(example.expected))
        return Grade(float(right), logs={"extracted": extract_gsm8k_answer(response)})


for _year in ("2024", "2025", "2026"):
    register(AIMEBenchmarkBuilder(_year, f"aime_{_year}"))
# The official name without a year is 2025.
register(AIMEBenchmarkBuilder("2025", "aime"))
