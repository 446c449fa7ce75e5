r"""Mathematical problems: GSM8K, AIME, MATH-500 and HMMT.

GSM8K (1,319 word problems, Cobbe et al. 2021) and AIME (30 problems per year, integers from 0 to
999) compare the final number. MATH-500 (Lightman et al. 2023) and HMMT (30 problems of each
tournament) compare expressions: the content of the last ``\boxed{…}``.
"""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks.data import (
    Row,
    RowBenchmark,
    Source,
    build_messages,
    column,
    make_example_id,
)
from tinker_cookbook.eval.benchmarks.registry import register
from tinker_cookbook.eval.run.examples import Example, Grade
from tinker_cookbook.eval.run.types import Metrics
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.grading.mathematics import grade_response
from tinker_cookbook.grading.numbers import (
    check_gsm8k,
    extract_gsm8k_answer,
    reference_number,
)
from tinker_cookbook.grading.numbers import (
    extract_number as extract_number,
)
from tinker_cookbook.grading.texts import extract_boxed
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

_SYSTEM_PROMPT = "Put your final answer in \\boxed{}."


class GSM8KBenchmarkBuilder(RowBenchmark):
    """GSM8K. The answer is the marked number, else the last number of a response."""

    name = "gsm8k"
    grader_version = "3"
    recommended_system_prompt = _SYSTEM_PROMPT
    source = Source(
        "openai/gsm8k",
        "test",
        folders=("gsm8k", "grade_school_math/data"),
        files=("test.jsonl", "gsm8k_test.jsonl"),
        config="main",
    )

    def example(self, row: Row) -> Example:
        """Returns a problem; the gold answer is the solution."""
        question = column(row, "question", where=self.name)
        solution = column(row, "answer", where=self.name)
        expected = str(solution).rpartition("####")[2].strip().replace(",", "")
        if reference_number(expected) is None:
            raise DataFormatError(
                f"{self.name}: answer: got {str(solution)[-80:]!r}, expected a number, or a "
                "solution that ends with '#### NUMBER'"
            )
        return Example(
            example_id=make_example_id(self.name, question),
            messages=build_messages(question),
            expected=expected,
            gold=solution,
            logs={"input": question, "expected": expected},
        )

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the final number of the response."""
        right = check_gsm8k(response, str(example.expected))
        return Grade(float(right), logs={"extracted": extract_gsm8k_answer(response)})


class AIMEBenchmarkBuilder(GSM8KBenchmarkBuilder):
    """The two competitions of a year; the Hub calls their split ``train``."""

    def __init__(self, year: str, benchmark_name: str) -> None:
        self.year, self.name = year, benchmark_name
        self.source = Source(
            f"MathArena/aime_{year}",
            "train",
            folders=("aime", f"aime_{year}", f"aime{year}"),
            files=(f"*{year}*.jsonl", f"*{year}*.json", f"*{year}*.parquet", "data/*.parquet"),
        )

    def example(self, row: Row) -> Example:
        """Returns a problem; ``073`` is 73."""
        problem = column(row, "problem", "question", "Problem", where=self.name)
        answer = str(column(row, "answer", "Answer", "expected_answer", where=self.name))
        if not answer.strip().isdigit():
            raise DataFormatError(
                f"{self.name}: answer: got {answer!r}, expected an integer from 0 to 999"
            )
        return Example(
            example_id=make_example_id(self.name, problem),
            messages=build_messages(problem),
            expected=int(answer),
            gold=f"\\boxed{{{answer}}}",
            logs={"input": problem, "expected": str(int(answer))},
        )

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the integer; no number above 999 is an answer in this competition."""
        grade = super().grade(response, example)
        return grade if 0 <= example.expected <= 999 else Grade(0.0, logs=grade.logs)


class MATH500BenchmarkBuilder(RowBenchmark):
    """MATH-500, with the score of each level of difficulty."""

    name = "math500"
    source = Source(
        "HuggingFaceH4/MATH-500",
        "test",
        folders=("math500", "MATH-500", "math"),
        files=("math500.jsonl", "test.jsonl"),
    )
    grader_version = "2"
    recommended_system_prompt = _SYSTEM_PROMPT

    def example(self, row: Row) -> Example:
        """Returns a problem; the gold answer is the complete solution."""
        problem = column(row, "problem", where=self.name)
        solution, answer = str(row.get("solution") or ""), row.get("answer")
        if answer is None:
            answer = extract_boxed(solution)
        if answer is None or not str(answer).strip():
            raise DataFormatError(
                f"{self.name}: answer: got {answer!r} for {problem[:80]!r}, expected text, or a "
                "solution with \\boxed{…}"
            )
        return Example(
            example_id=str(row.get("unique_id") or make_example_id(self.name, problem)),
            messages=build_messages(problem),
            expected=str(answer),
            gold=solution if "\\boxed" in solution else f"\\boxed{{{answer}}}",
            logs={"input": problem, "expected": str(answer), "level": row.get("level")},
        )

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the boxed answer; without a box ``math_verify`` searches the response."""
        right, extracted = grade_response(response, example.expected)
        level = example.logs.get("level")
        metrics: Metrics = {} if level is None else {f"level_{level}/accuracy": float(right)}
        return Grade(float(right), metrics, {"extracted": extracted})


class HMMTBenchmarkBuilder(MATH500BenchmarkBuilder):
    """One of the Harvard-MIT Mathematics Tournaments of 2025."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = Source(
            f"MathArena/{name}",
            "train",
            folders=("hmmt", name),
            files=(f"*{name.removeprefix('hmmt_')}*.jsonl", "data/*.parquet"),
        )


register(GSM8KBenchmarkBuilder())
for _year in ("2024", "2025", "2026"):
    register(AIMEBenchmarkBuilder(_year, f"aime_{_year}"))
# The official name without a year is 2025.
register(AIMEBenchmarkBuilder("2025", "aime"))
register(MATH500BenchmarkBuilder())
for _name in ("hmmt_feb_2025", "hmmt_nov_2025"):
    register(HMMTBenchmarkBuilder(_name))
