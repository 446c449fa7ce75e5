"""MMLU: 14,042 questions of 57 subjects with four choices (Hendrycks et al. 2021).

``mmlu`` has all subjects; ``mmlu_anatomy`` and so on are single subjects. By log-likelihood, each
question follows the five examples of the ``dev`` split, as in lm-evaluation-harness.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tinker_cookbook.eval.benchmarks._common import make_example_id
from tinker_cookbook.eval.benchmarks._data import Row, Source, column, read_csv, with_unique_ids
from tinker_cookbook.eval.benchmarks._multiple_choice import (
    LETTERS,
    MultipleChoiceBenchmark,
    plain_question,
)
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example
from tinker_cookbook.exceptions import DataFormatError, DataValidationError

_NAMES = """
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
SUBJECTS = tuple(_NAMES.split())
NUM_SHOTS = 5
_COLUMNS = ("question", "A", "B", "C", "D", "answer")


def _source(split: str, subject: str | None) -> Source:
    pattern = f"{subject or '*'}_{split}.csv"
    return Source(
        "cais/mmlu",
        split,
        folders=("mmlu", "mmlu/data", "data"),
        files=(f"{split}/{pattern}", pattern),
        config=subject or "all",
    )


def load_split(split: str, subject: str | None, data_path: str | None) -> list[Row]:
    """Returns rows with question, choices, answer (a position) and subject; None: all subjects."""
    source = _source(split, subject)
    if data_path is None:
        return source.load(None)
    # A single file cannot have both splits: questions would be their own solved examples.
    if Path(data_path).expanduser().is_file():
        raise DataValidationError(
            f"data_path: got the file {data_path}, expected a folder with the subfolders dev and "
            "test, or their parent folder"
        )
    rows: list[Row] = []
    for file in source.find(data_path):
        if file.suffix != ".csv":
            rows += source.load(str(file))
            continue
        name = file.stem.removesuffix(f"_{split}")
        for number, row in enumerate(_csv_rows(file), 1):
            rows.append({**row, "subject": name, "answer": _position(row, f"{file}:{number}")})
    return rows


def _csv_rows(file: Path) -> list[Row]:
    # The original files have no header; copies may have one with different names.
    rows = read_csv(file, _COLUMNS)
    return [{**row, "choices": [row[letter] for letter in "ABCD"]} for row in rows]


def _position(row: Row, where: str) -> int:
    answer = str(row["answer"]).strip()
    position = "ABCD".find(answer) if answer.isalpha() else int(answer or -1)
    if not 0 <= position < len(row["choices"]) or not answer:
        raise DataFormatError(f"{where}: answer: got {answer!r}, expected A to D or 0 to 3")
    return position


def few_shot_text(subject: str, shots: list[Row]) -> str:
    """Returns the text before a question: a sentence on the subject, and solved questions."""
    title = subject.replace("_", " ")
    solved = [
        f"{plain_question(row['question'], row['choices'])} {LETTERS[row['answer']]}\n\n"
        for row in shots
    ]
    introduction = f"The following are multiple choice questions (with answers) about {title}.\n\n"
    return introduction + "".join(solved)


class MMLUBenchmarkBuilder(MultipleChoiceBenchmark):
    """MMLU, or one of its subjects."""

    # Shuffle the whole benchmark: in file order, the first examples are all of one subject.
    shuffle_seed = 42

    def __init__(self, subject: str | None = None) -> None:
        self.subject = subject
        self.name = f"mmlu_{subject}" if subject else "mmlu"
        if subject:
            self.part_of, self.shuffle_seed = "mmlu", None

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the questions of the ``test`` split; by log-likelihood, after five examples of
        ``dev``."""
        shots: defaultdict[str, list[Row]] = defaultdict(list)
        if config.scoring == "logprob":
            for row in load_split("dev", self.subject, config.data_path):
                shots[row["subject"]].append(row)
        texts = {name: few_shot_text(name, rows[:NUM_SHOTS]) for name, rows in shots.items()}
        examples: list[Example] = []
        for row in load_split("test", self.subject, config.data_path):
            subject, question = column(row, "subject", where=self.name), row["question"]
            seed_text = "\n".join([subject, question, *row["choices"]])
            examples.append(
                self.make_example(
                    make_example_id("mmlu", seed_text),
                    question,
                    row["choices"],
                    row["answer"],
                    group=None if self.subject else subject,
                    shots=texts.get(subject) or few_shot_text(subject, []),
                )
            )
        return with_unique_ids(examples)


for _subject in (None, *SUBJECTS):
    register(MMLUBenchmarkBuilder(_subject))
