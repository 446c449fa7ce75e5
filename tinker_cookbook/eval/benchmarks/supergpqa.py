"""SuperGPQA: 26,529 questions of 285 graduate disciplines with up to ten choices."""

from __future__ import annotations

from tinker_cookbook.eval.benchmarks._common import make_example_id
from tinker_cookbook.eval.benchmarks._data import Source, column, with_unique_ids
from tinker_cookbook.eval.benchmarks._multiple_choice import (
    LETTERS,
    REASONED_INSTRUCTION,
    MultipleChoiceBenchmark,
)
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

SOURCE = Source(
    "m-a-p/SuperGPQA",
    "train",
    folders=("supergpqa", "SuperGPQA"),
    files=("SuperGPQA-all.jsonl", "*.jsonl", "*.parquet"),
)


class SuperGPQABenchmarkBuilder(MultipleChoiceBenchmark):
    """SuperGPQA."""

    name = "supergpqa"
    instruction = REASONED_INSTRUCTION
    shuffle_seed = 42

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns all questions; the Hub calls their split ``train``."""
        return with_unique_ids(
            self.make_example(
                str(row.get("uuid") or make_example_id(self.name, row["question"])),
                column(row, "question", where=self.name),
                column(row, "options", where=self.name),
                LETTERS.index(column(row, "answer_letter", where=self.name)),
                group=str(row.get("discipline", "other")).replace(" ", "_"),
            )
            for row in SOURCE.load(config.data_path)
        )


register(SuperGPQABenchmarkBuilder())
