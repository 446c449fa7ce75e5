"""C-Eval: Chinese examination questions of 52 subjects with four choices (Huang et al. 2023).

The answers of the test split are not public, so the ``val`` split is used (1,346 questions).
"""

from __future__ import annotations

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
from tinker_cookbook.eval.benchmarks._multiple_choice import LETTERS, MultipleChoiceBenchmark
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

_NAMES = """
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
SUBJECTS = tuple(_NAMES.split())
SOURCE = Source(
    "ceval/ceval-exam",
    "val",
    folders=("ceval", "ceval-exam"),
    files=("val/*_val.csv", "*_val.csv", "*/val-*.parquet"),
)


def _rows(data_path: str | None) -> Iterator[tuple[str, Row]]:
    if data_path is None:
        for subject in SUBJECTS:
            yield from ((subject, row) for row in load_hub_rows(SOURCE.hub, "val", subject))
        return
    for file in SOURCE.find(data_path):
        subject = file.stem.removesuffix("_val") if file.suffix == ".csv" else file.parent.name
        yield from ((subject, row) for row in read_rows(file))


class CEvalBenchmarkBuilder(MultipleChoiceBenchmark):
    """C-Eval, ``val`` split."""

    name = "ceval"
    shuffle_seed = 42

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the questions of all subjects."""
        examples: list[Example] = []
        for subject, row in _rows(config.data_path):
            where = f"{self.name}/{subject}"
            question = column(row, "question", where=where)
            choices = [str(column(row, letter, where=where)) for letter in "ABCD"]
            index = LETTERS.index(column(row, "answer", where=where).strip())
            example_id = make_example_id(self.name, "\n".join([subject, question]))
            examples.append(self.make_example(example_id, question, choices, index, group=subject))
        return with_unique_ids(examples)


register(CEvalBenchmarkBuilder())
