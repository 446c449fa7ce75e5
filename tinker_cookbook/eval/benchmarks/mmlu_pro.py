"""MMLU-Pro: 12,032 harder questions of 14 subjects with up to ten choices (Wang et al. 2024)."""

# Official names are lazy, so a type checker does not see them.
# pyright: reportUnsupportedDunderAll=false
from __future__ import annotations

from tinker_cookbook.eval.benchmarks._common import extract_mcq_answer, make_example_id
from tinker_cookbook.eval.benchmarks._data import Source, column, with_unique_ids
from tinker_cookbook.eval.benchmarks._multiple_choice import (
    LETTERS,
    REASONED_INSTRUCTION,
    MultipleChoiceBenchmark,
)
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example
from tinker_cookbook.eval.benchmarks.mmlu import few_shot_text
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

__all__ = ["MMLUProBenchmarkBuilder", "MMLUProMessageEnv", "extract_mcq_answer"]  # noqa: F822  (lazy)

SOURCE = Source(
    "TIGER-Lab/MMLU-Pro",
    "test",
    folders=("mmlu_pro", "mmlu-pro", "MMLU-Pro"),
    files=("test.jsonl", "test.json", "data/test-*.parquet", "test*.parquet"),
)


class MMLUProBenchmarkBuilder(MultipleChoiceBenchmark):
    """MMLU-Pro."""

    name = "mmlu_pro"
    instruction = REASONED_INSTRUCTION
    shuffle_seed = 42

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the questions of the ``test`` split."""
        examples: list[Example] = []
        for row in SOURCE.load(config.data_path):
            question = column(row, "question", where=self.name)
            # Questions with fewer than ten choices are padded in some copies.
            choices = [x for x in column(row, "options", where=self.name) if x != "N/A"]
            index = row.get("answer_index")
            if index is None:
                index = LETTERS.index(column(row, "answer", where=self.name).strip())
            number = row.get("question_id")
            examples.append(
                self.make_example(
                    make_example_id(self.name, question)
                    if number is None
                    else f"{self.name}_{number}",
                    question,
                    choices,
                    int(index),
                    group=str(row.get("category", "other")).replace(" ", "_"),
                    shots=few_shot_text(str(row.get("category", "all subjects")), []),
                )
            )
        return with_unique_ids(examples)


register(MMLUProBenchmarkBuilder())
