"""BIG-Bench Hard: 6,511 questions of 27 tasks on reasoning (Suzgun et al. 2022).

``bbh`` has all tasks; ``bbh_navigate`` and so on are single tasks. A prompt has no examples; the
published scores use three examples with reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tinker_cookbook.eval.benchmarks.data import Row, RowBenchmark, Source, build_messages, column
from tinker_cookbook.eval.benchmarks.registry import register
from tinker_cookbook.eval.run.examples import Example, Grade
from tinker_cookbook.eval.run.types import BenchmarkConfig, Metrics
from tinker_cookbook.grading.letters import extract_mcq_answer
from tinker_cookbook.grading.numbers import final_number
from tinker_cookbook.grading.texts import extract_final_answer

_NAMES = """
boolean_expressions causal_judgement date_understanding disambiguation_qa dyck_languages
formal_fallacies geometric_shapes hyperbaton logical_deduction_five_objects
logical_deduction_seven_objects logical_deduction_three_objects movie_recommendation
multistep_arithmetic_two navigate object_counting penguins_in_a_table
reasoning_about_colored_objects ruin_names salient_translation_error_detection snarks
sports_understanding temporal_sequences tracking_shuffled_objects_five_objects
tracking_shuffled_objects_seven_objects tracking_shuffled_objects_three_objects web_of_lies
word_sorting
"""
TASKS = tuple(_NAMES.split())
INSTRUCTION = 'Think step by step. End with a line "The answer is X.", where X is your answer.'
_WORD_SETS = (("yes", "no"), ("true", "false"), ("valid", "invalid"))
_OPTION = re.compile(r"^\(([A-Z])\)", re.MULTILINE)
_BRACKETS = set("()[]{}<>")


def _letter(response: str, options: str) -> str:
    found = extract_mcq_answer(response, options)
    return f"({found})" if found else extract_final_answer(response)


def _word(words: tuple[str, ...]) -> Callable[[str], str]:
    pattern = re.compile(rf"(\bnot\s+)?\b({'|'.join(words)})\b", re.IGNORECASE)

    def extract(response: str) -> str:
        answer = extract_final_answer(response)
        found = pattern.findall(answer) or pattern.findall(response)
        if not found:
            return answer
        # The final answer is at the beginning: "Yes, since no step is missing".
        negated, word = pattern.findall(answer)[0] if pattern.search(answer) else found[-1]
        word = word.lower()
        # "not valid" means "invalid".
        return words[1 - words.index(word)] if negated else word

    return extract


def _number(response: str) -> str:
    number = final_number(response)
    if number is None:
        return extract_final_answer(response)
    return number.text.partition(".")[0] if number.value.denominator == 1 else number.text


def _words(response: str) -> str:
    return " ".join(extract_final_answer(response).replace(",", " ").lower().split())


def _brackets(response: str) -> str:
    return " ".join(character for character in extract_final_answer(response) if character.strip())


def _extractor(question: str, target: str) -> Callable[[str], str]:
    """Returns the function that reads an answer, by the type of the target."""
    options = "".join(_OPTION.findall(question))
    if options:
        return lambda response: _letter(response, options)
    for words in _WORD_SETS:
        if target.lower() in words:
            return _word(words)
    if re.fullmatch(r"-?\d+", target):
        return _number
    return _brackets if set(target) <= _BRACKETS | {" "} else _words


def _choices(question: str, target: str) -> list[str]:
    """Returns the possible answers of a question; empty unless they are a small set."""
    if options := _OPTION.findall(question):
        return [f"({letter})" for letter in options]
    for words in _WORD_SETS:
        if target.lower() in words:
            return [word.title() if target.istitle() else word for word in words]
    return []


class BBHBenchmarkBuilder(RowBenchmark):
    """BIG-Bench Hard, or one of its tasks."""

    grader_version = "3"
    shuffle_seed = 42

    def __init__(self, task: str | None = None) -> None:
        self.task = task
        self.name = f"bbh_{task}" if task else "bbh"
        if task:
            self.part_of, self.shuffle_seed = "bbh", None

    def rows(self, config: BenchmarkConfig) -> Iterator[Row]:
        """Returns the questions with their task, and the position in its file as their id."""
        for task in [self.task] if self.task else TASKS:
            for position, row in enumerate(_source(task).load(config.data_path)):
                yield {**row, "task": task, "id": f"{task}_{position}"}

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the examples; for log-likelihood scoring, those with a few possible answers."""
        examples = super().load_examples(config)
        by_choice = config.scoring == "logprob"
        return [e for e in examples if e.answer_index is not None or not by_choice]

    def example(self, row: Row) -> Example:
        """Returns a question."""
        question = column(row, "input", where=self.name)
        target = column(row, "target", where=self.name).strip()
        choices = _choices(question, target)
        logs = {"input": question, "expected": target, "group": row["task"]}
        return Example(
            example_id=row["id"],
            messages=build_messages(f"{question}\n\n{INSTRUCTION}"),
            expected=_extractor(question, target)(f"The answer is {target}."),
            gold=f"The answer is {target}.",
            logs=logs,
            choices=tuple(f" {choice}" for choice in choices),
            answer_index=choices.index(target) if target in choices else None,
            context=f"Q: {question}\nA:",
        )

    def grade(self, response: str, example: Example) -> Grade:
        """Compares the answer with the target, according to the target's type."""
        question, target = example.logs["input"], example.logs["expected"]
        given = _extractor(question, target)(response)
        right = float(given == example.expected)
        metrics: Metrics = {} if self.task else {f"{example.logs['group']}/accuracy": right}
        return Grade(right, metrics, {"extracted": given})


def _source(task: str) -> Source:
    return Source(
        "lukaemon/bbh",
        "test",
        folders=("bbh", "BIG-Bench-Hard/bbh"),
        files=(f"{task}.json",),
        config=task,
    )


for _task in (None, *TASKS):
    register(BBHBenchmarkBuilder(_task))
