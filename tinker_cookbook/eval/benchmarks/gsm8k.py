"""GSM8K: 1,319 grade-school word problems with numbers as answers (Cobbe et al. 2021)."""

# Official names are lazy, so a type checker does not see them.
# pyright: reportUnsupportedDunderAll=false
from __future__ import annotations

from tinker_cookbook.eval.benchmarks._common import (
    build_messages,
    check_gsm8k,
    extract_boxed,
    extract_gsm8k_answer,
    extract_number,
    make_example_id,
)
from tinker_cookbook.eval.benchmarks._data import Source, column, with_unique_ids
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, Grade
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.grading.numbers import reference_number
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

__all__ = [
    "GSM8KBenchmarkBuilder",
    "GSM8KMessageEnv",  # noqa: F822  (lazy)
    "check_gsm8k",
    "extract_boxed",
    "extract_gsm8k_answer",
    "extract_number",
]

SOURCE = Source(
    "openai/gsm8k",
    "test",
    folders=("gsm8k", "grade_school_math/data"),
    files=("test.jsonl", "gsm8k_test.jsonl"),
    config="main",
)


class GSM8KBenchmarkBuilder(ExampleBenchmark):
    """GSM8K. The answer is the marked number, else the last number of a response."""

    name = "gsm8k"
    grader_version = "3"
    recommended_system_prompt = "Put your final answer in \\boxed{}."

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the problems of the ``test`` split."""
        examples: list[Example] = []
        for row in SOURCE.load(config.data_path):
            question = column(row, "question", where=self.name)
            solution = column(row, "answer", where=self.name)
            expected = str(solution).rpartition("####")[2].strip().replace(",", "")
            if reference_number(expected) is None:
                raise DataFormatError(
                    f"{self.name}: answer: got {str(solution)[-80:]!r}, expected a number, or a "
                    "solution that ends with '#### NUMBER'"
                )
            examples.append(
                Example(
                    example_id=make_example_id(self.name, question),
                    messages=build_messages(question),
                    expected=expected,
                    gold=solution,
                    logs={"input": question, "expected": expected},
                )
            )
        return with_unique_ids(examples)

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the final number of the response."""
        right = check_gsm8k(response, example.expected)
        return Grade(float(right), logs={"extracted": extract_gsm8k_answer(response)})


register(GSM8KBenchmarkBuilder())
