"""Multiple choice by generation and by log-likelihood: MMLU and similar benchmarks.

By generation the model reads the question with its choices and answers with a letter. By
log-likelihood (``scoring=logprob``) a plain text ends in ``Answer:``, and the letter with the
highest log-probability after it is the answer. The text has the same format as the ``mmlu`` tasks
of lm-evaluation-harness, so that scores of base models can be compared.
"""

from __future__ import annotations

import ast
import random
import string
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from tinker_cookbook.eval.run.types import BenchmarkConfig, Logs, Metrics
from tinker_cookbook.exceptions import DataFormatError, DataValidationError
from tinker_cookbook.grading.letters import extract_mcq_answer
from tinker_cookbook.grading.texts import comparable_text, extract_final_answer
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

LETTERS = string.ascii_uppercase
INSTRUCTION = "Answer with the letter of the right choice and nothing else."
REASONED_INSTRUCTION = (
    'Think step by step. End with a line "Answer: X", where X is the letter of the right choice.'
)
NUM_SHOTS = 5

# The subjects of MMLU, of C-Eval, and those that the Hub has of MMLU-Redux.
_MMLU = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology
college_chemistry college_computer_science college_mathematics college_medicine college_physics
computer_security conceptual_physics econometrics electrical_engineering elementary_mathematics
formal_logic global_facts high_school_biology high_school_chemistry high_school_computer_science
high_school_european_history high_school_geography high_school_government_and_politics
high_school_macroeconomics high_school_mathematics high_school_microeconomics
high_school_physics high_school_psychology high_school_statistics high_school_us_history
high_school_world_history human_aging human_sexuality international_law jurisprudence
logical_fallacies machine_learning management marketing medical_genetics miscellaneous
moral_disputes moral_scenarios nutrition philosophy prehistory professional_accounting
professional_law professional_medicine professional_psychology public_relations security_studies
sociology us_foreign_policy virology world_religions
"""
_CEVAL = """
accountant advanced_mathematics art_studies basic_medicine business_administration
chinese_language_and_literature civil_servant clinical_medicine college_chemistry
college_economics college_physics college_programming computer_architecture computer_network
discrete_mathematics education_science electrical_engineer
environmental_impact_assessment_engineer fire_engineer high_school_biology high_school_chemistry
high_school_chinese high_school_geography high_school_history high_school_mathematics
high_school_physics high_school_politics ideological_and_moral_cultivation law
legal_professional logic mao_zedong_thought marxism metrology_engineer middle_school_biology
middle_school_chemistry middle_school_geography middle_school_history middle_school_mathematics
middle_school_physics middle_school_politics modern_chinese_history operating_system physician
plant_protection probability_and_statistics professional_tour_guide sports_science
tax_accountant teacher_qualification urban_and_rural_planner veterinary_medicine
"""
_REDUX = """
anatomy astronomy business_ethics clinical_knowledge college_chemistry college_computer_science
college_mathematics college_medicine college_physics conceptual_physics econometrics
electrical_engineering formal_logic global_facts high_school_chemistry high_school_geography
high_school_macroeconomics high_school_mathematics high_school_physics high_school_statistics
high_school_us_history human_aging logical_fallacies machine_learning miscellaneous philosophy
professional_accounting professional_law public_relations virology
"""
SUBJECTS = tuple(_MMLU.split())


@dataclass(frozen=True)
class Question:
    """A question with one right choice."""

    text: str
    choices: Sequence[str]
    answer: int
    """Index of the right choice."""
    example_id: str
    group: str | None = None
    """Subject with a separate score."""
    shots: str = ""
    """Plain text before the question, for scoring by log-likelihood."""


def plain_question(question: str, choices: Sequence[str]) -> str:
    """Returns the question, one line for each choice (``A. …``), and ``Answer:``."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question.strip(), *lines, "Answer:"])


def few_shot_text(subject: str, shots: Sequence[Row]) -> str:
    """Returns the text before a question: a sentence on the subject, and solved questions."""
    title = subject.replace("_", " ")
    solved = [
        f"{plain_question(row['question'], row['choices'])} {LETTERS[row['answer']]}\n\n"
        for row in shots
    ]
    introduction = f"The following are multiple choice questions (with answers) about {title}.\n\n"
    return introduction + "".join(solved)


class MultipleChoiceBenchmark(RowBenchmark):
    """Benchmark of questions with one right choice each."""

    grader_version = "3"
    instruction = INSTRUCTION
    # In file order, the first examples are all of one subject.
    shuffle_seed = 42

    @abstractmethod
    def question(self, row: Row) -> Question:
        """Returns the question of a row."""

    def example(self, row: Row) -> Example:
        """Returns the example of a row."""
        question = self.question(row)
        text, choices = question.text, list(question.choices)
        if not 0 <= question.answer < len(choices) <= len(LETTERS):
            raise DataFormatError(
                f"{self.name}/{question.example_id}: got answer {question.answer} of "
                f"{len(choices)} choices, expected the index of a choice, and at most "
                f"{len(LETTERS)} choices"
            )
        letter = LETTERS[question.answer]
        lines = "\n".join(f"({x}) {choice}" for x, choice in zip(LETTERS, choices, strict=False))
        logs: Logs = {"input": text, "expected": letter, "choices": choices}
        if question.group is not None:
            logs["group"] = question.group
        return Example(
            example_id=question.example_id,
            messages=build_messages(f"{text.strip()}\n\n{lines}\n\n{self.instruction}"),
            expected=letter,
            gold=f"Answer: {letter}",
            logs=logs,
            choices=tuple(f" {LETTERS[i]}" for i in range(len(choices))),
            answer_index=question.answer,
            context=question.shots + plain_question(text, choices),
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


def _mmlu_source(split: str, subject: str | None) -> Source:
    pattern = f"{subject or '*'}_{split}.csv"
    return Source(
        "cais/mmlu",
        split,
        folders=("mmlu", "mmlu/data", "data"),
        files=(f"{split}/{pattern}", pattern),
        config=subject or "all",
        # The original files have no header; copies may have one with different names.
        columns=("question", "A", "B", "C", "D", "answer"),
        has_subjects=True,
    )


def load_split(split: str, subject: str | None, data_path: str | None) -> Iterator[Row]:
    """Yields rows with question, choices, answer (a position) and subject; None: all subjects."""
    # A single file cannot have both splits: questions would be their own solved examples.
    if data_path is not None and Path(data_path).expanduser().is_file():
        raise DataValidationError(
            f"data_path: got the file {data_path}, expected a folder with the subfolders dev and "
            "test, or their parent folder"
        )
    for row in _mmlu_source(split, subject).load(data_path):
        if "choices" not in row:
            answer = str(row["answer"]).strip()
            position = "ABCD".find(answer) if answer.isalpha() else int(answer)
            row = {**row, "choices": [row[x] for x in "ABCD"], "answer": position}
        yield row


class MMLUBenchmarkBuilder(MultipleChoiceBenchmark):
    """MMLU (Hendrycks et al. 2021): 14,042 questions of 57 subjects, or one of its subjects.

    By log-likelihood, each question follows the five examples of the ``dev`` split.
    """

    def __init__(self, subject: str | None = None) -> None:
        self.subject = subject
        self.name = f"mmlu_{subject}" if subject else "mmlu"
        if subject:
            self.part_of, self.shuffle_seed = "mmlu", None

    def rows(self, config: BenchmarkConfig) -> Iterable[Row]:
        """Returns the rows of the ``test`` split, by log-likelihood with the text before each."""
        shots: defaultdict[str, list[Row]] = defaultdict(list)
        if config.scoring == "logprob":
            for row in load_split("dev", self.subject, config.data_path):
                shots[row["subject"]].append(row)
        texts = {name: few_shot_text(name, rows[:NUM_SHOTS]) for name, rows in shots.items()}
        for row in load_split("test", self.subject, config.data_path):
            yield {**row, "shots": texts.get(row.get("subject", ""))}

    def question(self, row: Row) -> Question:
        """Returns the question of a row."""
        subject, text = column(row, "subject", where=self.name), row["question"]
        return Question(
            text,
            row["choices"],
            row["answer"],
            make_example_id("mmlu", "\n".join([subject, text, *row["choices"]])),
            group=None if self.subject else subject,
            shots=row["shots"] or few_shot_text(subject, []),
        )


class MMLUReduxBenchmarkBuilder(MultipleChoiceBenchmark):
    """MMLU-Redux (Gema et al. 2024): MMLU questions in which people found no error.

    The Hub has 3,000 questions of 30 subjects; the authors' GitHub repository has 5,700 of 57 as
    ``mmlu_SUBJECT.csv``.
    """

    name = "mmlu_redux"
    source = Source(
        "edinburgh-dawg/mmlu-redux",
        "test",
        folders=("mmlu_redux", "mmlu-redux", "mmlu-redux/mmlu_redux"),
        files=("mmlu_*.csv", "mmlu_redux/mmlu_*.csv", "*/data-*.parquet", "*/test*.parquet"),
        subjects=tuple(_REDUX.split()),
    )

    def rows(self, config: BenchmarkConfig) -> Iterable[Row]:
        """Returns the rows with ``error_type`` ``ok``."""
        for row in super().rows(config):
            # The annotators also wrote "OK", "Ok" and "ok ".
            if str(row.get("error_type", "ok")).strip().lower() == "ok":
                yield row

    def question(self, row: Row) -> Question:
        """Returns the question of a row."""
        subject = row["subject"]
        where = f"{self.name}/{subject}"
        text, choices = str(column(row, "question", where=where)), row["choices"]
        if isinstance(choices, str):  # csv files store the list as text
            choices = ast.literal_eval(choices)
        choices = [str(choice) for choice in choices]
        return Question(
            text,
            choices,
            int(column(row, "answer", where=where)),
            make_example_id(self.name, "\n".join([subject, text, *choices])),
            group=subject,
            shots=few_shot_text(subject, []),
        )


class MMLUProBenchmarkBuilder(MultipleChoiceBenchmark):
    """MMLU-Pro (Wang et al. 2024): 12,032 harder questions of 14 subjects, up to ten choices."""

    name = "mmlu_pro"
    instruction = REASONED_INSTRUCTION
    source = Source(
        "TIGER-Lab/MMLU-Pro",
        "test",
        folders=("mmlu_pro", "mmlu-pro", "MMLU-Pro"),
        files=("test.jsonl", "test.json", "data/test-*.parquet", "test*.parquet"),
    )

    def question(self, row: Row) -> Question:
        """Returns the question of a row."""
        text, number = column(row, "question", where=self.name), row.get("question_id")
        index = row.get("answer_index")
        if index is None:
            index = LETTERS.index(column(row, "answer", where=self.name).strip())
        return Question(
            text,
            # Questions with fewer than ten choices are padded in some copies.
            [x for x in column(row, "options", where=self.name) if x != "N/A"],
            int(index),
            make_example_id(self.name, text) if number is None else f"{self.name}_{number}",
            group=str(row.get("category", "other")).replace(" ", "_"),
            shots=few_shot_text(str(row.get("category", "all subjects")), []),
        )


class SuperGPQABenchmarkBuilder(MultipleChoiceBenchmark):
    """SuperGPQA: 26,529 questions of 285 graduate disciplines with up to ten choices."""

    name = "supergpqa"
    instruction = REASONED_INSTRUCTION
    source = Source(
        "m-a-p/SuperGPQA",
        "train",
        folders=("supergpqa", "SuperGPQA"),
        files=("SuperGPQA-all.jsonl", "*.jsonl", "*.parquet"),
    )

    def question(self, row: Row) -> Question:
        """Returns the question of a row."""
        text = column(row, "question", where=self.name)
        return Question(
            text,
            column(row, "options", where=self.name),
            LETTERS.index(column(row, "answer_letter", where=self.name)),
            str(row.get("uuid") or make_example_id(self.name, text)),
            group=str(row.get("discipline", "other")).replace(" ", "_"),
        )


class CEvalBenchmarkBuilder(MultipleChoiceBenchmark):
    """C-Eval (Huang et al. 2023): Chinese examination questions of 52 subjects.

    The answers of the test split are not public, so the ``val`` split is used (1,346 questions).
    """

    name = "ceval"
    source = Source(
        "ceval/ceval-exam",
        "val",
        folders=("ceval", "ceval-exam"),
        files=("val/*_val.csv", "*_val.csv", "*/val-*.parquet"),
        subjects=tuple(_CEVAL.split()),
    )

    def question(self, row: Row) -> Question:
        """Returns the question of a row."""
        subject = row["subject"]
        where = f"{self.name}/{subject}"
        text = column(row, "question", where=where)
        return Question(
            text,
            [str(column(row, letter, where=where)) for letter in "ABCD"],
            LETTERS.index(column(row, "answer", where=where).strip()),
            make_example_id(self.name, "\n".join([subject, text])),
            group=subject,
        )


class GPQABenchmarkBuilder(MultipleChoiceBenchmark):
    """GPQA Diamond (Rein et al. 2023): 198 questions of experts, in their file's order.

    The Hub dataset is gated: accept its terms on the Hub, or give a local copy of
    ``gpqa_diamond.csv``. The authors ask not to publish the questions as plain text.
    """

    name = "gpqa"
    instruction = REASONED_INSTRUCTION
    shuffle_seed = None
    source = Source(
        "Idavidrein/gpqa",
        "train",
        folders=("gpqa", "dataset"),
        files=("gpqa_diamond.csv", "gpqa_diamond.jsonl"),
        config="gpqa_diamond",
    )

    def question(self, row: Row) -> Question:
        """Returns the question of a row, with its choices in a fixed random order."""
        text = column(row, "Question", where=self.name)
        names = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
        choices = [column(row, name, where=self.name).strip() for name in names]
        example_id = make_example_id(self.name, text)
        # The data have the right answer first. Shuffle by the id: the order is the same in every
        # run.
        order = random.Random(example_id).sample(range(4), 4)
        return Question(
            text,
            [choices[i] for i in order],
            order.index(0),
            example_id,
            group=row.get("High-level domain"),
        )


for _subject in (None, *SUBJECTS):
    register(MMLUBenchmarkBuilder(_subject))
for _builder in (
    CEvalBenchmarkBuilder,
    GPQABenchmarkBuilder,
    MMLUProBenchmarkBuilder,
    MMLUReduxBenchmarkBuilder,
    SuperGPQABenchmarkBuilder,
):
    register(_builder())
