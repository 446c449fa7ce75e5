"""MMLU-Redux: MMLU questions checked by people (Gema et al. 2024).

Only questions without an error count (``error_type`` is ``ok``). The Hub has 3,000 questions of 30
subjects; the authors' GitHub repository has 5,700 of 57 as ``mmlu_SUBJECT.csv``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tinker_cookbook.eval.benchmarks._common import make_example_id
from tinker_cookbook.eval.benchmarks._data import (
    Row,
    Source,
    column,
    load_hub_rows,
    read_rows,
    with_unique_ids,
)
from tinker_cookbook.eval.benchmarks._multiple_choice import MultipleChoiceBenchmark
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example
from tinker_cookbook.eval.benchmarks.mmlu import few_shot_text
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

_NAMES = """
anatomy astronomy business_ethics clinical_knowledge college_chemistry college_computer_science
college_mathematics college_medicine college_physics conceptual_physics econometrics
electrical_engineering formal_logic global_facts high_school_chemistry high_school_geography
high_school_macroeconomics high_school_mathematics high_school_physics high_school_statistics
high_school_us_history human_aging logical_fallacies machine_learning miscellaneous philosophy
professional_accounting professional_law public_relations virology
"""
HUB_SUBJECTS = tuple(_NAMES.split())
SOURCE = Source(
    "edinburgh-dawg/mmlu-redux",
    "test",
    folders=("mmlu_redux", "mmlu-redux", "mmlu-redux/mmlu_redux"),
    files=("mmlu_*.csv", "mmlu_redux/mmlu_*.csv", "*/data-*.parquet", "*/test*.parquet"),
)


def _rows(data_path: str | None) -> Iterator[tuple[str, Row]]:
    """Yields the subject and the row of each question."""
    if data_path is None:
        for subject in HUB_SUBJECTS:
            yield from ((subject, row) for row in load_hub_rows(SOURCE.hub, "test", subject))
        return
    for file in SOURCE.find(data_path):
        named = file.stem.startswith("mmlu_")
        subject = file.stem.removeprefix("mmlu_") if named else file.parent.name
        yield from ((subject, row) for row in read_rows(file))


def _choices(row: Row, where: str) -> list[str]:
    choices = column(row, "choices", where=where)
    if isinstance(choices, str):  # csv files store the list as text
        try:
            choices = ast.literal_eval(choices)
        except (ValueError, SyntaxError) as error:
            raise DataFormatError(f"{where}: choices: got {choices!r}, expected a list") from error
    return [str(choice) for choice in choices]


class MMLUReduxBenchmarkBuilder(MultipleChoiceBenchmark):
    """MMLU-Redux: the questions without an error."""

    name = "mmlu_redux"
    shuffle_seed = 42

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the questions with ``error_type`` ``ok``."""
        examples: list[Example] = []
        for subject, row in _rows(config.data_path):
            # The annotators also wrote "OK", "Ok" and "ok ".
            if str(row.get("error_type", "ok")).strip().lower() != "ok":
                continue
            where = f"{self.name}/{subject}"
            question = str(column(row, "question", where=where))
            choices = _choices(row, where)
            examples.append(
                self.make_example(
                    make_example_id(self.name, "\n".join([subject, question, *choices])),
                    question,
                    choices,
                    int(column(row, "answer", where=where)),
                    group=subject,
                    shots=few_shot_text(subject, []),
                )
            )
        return with_unique_ids(examples)


register(MMLUReduxBenchmarkBuilder())
