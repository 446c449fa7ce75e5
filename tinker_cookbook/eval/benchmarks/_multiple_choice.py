"""Multiple choice by generation and by log-likelihood, for MMLU and similar benchmarks.

By generation the model reads the question with its choices and answers with a letter. By
log-likelihood (``scoring=logprob``) a plain text ends in ``Answer:``, and the letter with the
highest log-probability after it is the answer. The text has the same format as the ``mmlu`` tasks
of lm-evaluation-harness, so that scores of base models can be compared.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from tinker_cookbook.eval.benchmarks._common import (
    build_messages,
    extract_final_answer,
    extract_mcq_answer,
    format_mcq_choices,
)
from tinker_cookbook.eval.benchmarks._data import mean_by_key
from tinker_cookbook.eval.benchmarks._types import BenchmarkResult, Logs, Metrics
from tinker_cookbook.eval.benchmarks.example import Example, ExampleBenchmark, Grade
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.grading.texts import comparable_text

LETTERS = string.ascii_uppercase
INSTRUCTION = "Answer with the letter of the right choice and nothing else."
REASONED_INSTRUCTION = (
    'Think step by step. End with a line "Answer: X", where X is the letter of the right choice.'
)


def plain_question(question: str, choices: Sequence[str]) -> str:
    """Returns the question, one line for each choice (``A. …``), and ``Answer:``."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question.strip(), *lines, "Answer:"])


class MultipleChoiceBenchmark(ExampleBenchmark):
    """Benchmark of questions with one right choice each."""

    grader_version = "3"
    instruction = INSTRUCTION

    def make_example(
        self,
        example_id: str,
        question: str,
        choices: Sequence[str],
        answer_index: int,
        group: str | None = None,
        shots: str = "",
    ) -> Example:
        """Returns the example of a question.

        ``group`` is a subject with a separate score; ``shots`` is the plain text before the
        question, for scoring by log-likelihood.
        """
        if not 0 <= answer_index < len(choices) <= len(LETTERS):
            raise DataFormatError(
                f"{self.name}/{example_id}: got answer {answer_index} of {len(choices)} choices, "
                f"expected the index of a choice, and at most {len(LETTERS)} choices"
            )
        letter = LETTERS[answer_index]
        prompt = f"{question.strip()}\n\n{format_mcq_choices(list(choices))}\n\n{self.instruction}"
        logs: Logs = {"input": question, "expected": letter, "choices": list(choices)}
        if group is not None:
            logs["group"] = group
        return Example(
            example_id=example_id,
            messages=build_messages(prompt),
            expected=letter,
            gold=f"Answer: {letter}",
            logs=logs,
            choices=tuple(f" {LETTERS[i]}" for i in range(len(choices))),
            answer_index=answer_index,
            context=shots + plain_question(question, choices),
        )

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the chosen letter; the response may also be the text of a choice."""
        choices: list[str] = example.logs["choices"]
        letter = extract_mcq_answer(response, LETTERS[: len(choices)])
        if not letter:
            said = comparable_text(extract_final_answer(response))
            same = [
                i for i, choice in enumerate(choices) if said and comparable_text(choice) == said
            ]
            # If two choices have the same text, the text is ambiguous.
            letter = LETTERS[same[0]] if len(same) == 1 else ""
        right = float(letter == example.expected)
        group = example.logs.get("group")
        metrics: Metrics = {} if group is None else {f"{group}/accuracy": right}
        return Grade(right, metrics, {"extracted": letter})

    def aggregate(self, rewards: list[float], metrics_list: list[Metrics]) -> BenchmarkResult:
        """Adds the score of each group."""
        result = super().aggregate(rewards, metrics_list)
        result.metrics |= mean_by_key(metrics_list, lambda name: name.endswith("/accuracy"))
        return result
