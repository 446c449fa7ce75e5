"""GPQA Diamond: 198 questions of experts with four choices (Rein et al. 2023).

The Hub dataset is gated: accept its terms on the Hub, or give a local copy of ``gpqa_diamond.csv``.
The authors ask not to publish the questions as plain text.
"""

from __future__ import annotations

import random

from tinker_cookbook.eval.benchmarks._common import make_example_id
from tinker_cookbook.eval.benchmarks._data import Source, column, with_unique_ids
from tinker_cookbook.eval.benchmarks._multiple_choice import (
    REASONED_INSTRUCTION,
    MultipleChoiceBenchmark,
)
from tinker_cookbook.eval.benchmarks._registry import register
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.example import Example
from tinker_cookbook.utils.imports import official_names

__getattr__ = official_names(__name__)

SOURCE = Source(
    "Idavidrein/gpqa",
    "train",
    folders=("gpqa", "dataset"),
    files=("gpqa_diamond.csv", "gpqa_diamond.jsonl"),
    config="gpqa_diamond",
)


class GPQABenchmarkBuilder(MultipleChoiceBenchmark):
    """GPQA Diamond. The choices of a question are in a fixed random order."""

    name = "gpqa"
    instruction = REASONED_INSTRUCTION

    def load_examples(self, config: BenchmarkConfig) -> list[Example]:
        """Returns the questions; the Hub calls their split ``train``."""
        examples: list[Example] = []
        for row in SOURCE.load(config.data_path):
            question = column(row, "Question", where=self.name)
            right = column(row, "Correct Answer", where=self.name).strip()
            wrong = [
                column(row, f"Incorrect Answer {i}", where=self.name).strip() for i in (1, 2, 3)
            ]
            example_id = make_example_id(self.name, question)
            # The data have the right answer first. Shuffle by the id: the order is the same in
            # every run.
            order = random.Random(example_id).sample(range(4), 4)
            choices = [[right, *wrong][i] for i in order]
            group = row.get("High-level domain")
            examples.append(
                self.make_example(example_id, question, choices, order.index(0), group=group)
            )
        return with_unique_ids(examples)


register(GPQABenchmarkBuilder())
