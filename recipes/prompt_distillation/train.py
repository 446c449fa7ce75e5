"""Prompt distillation, step 2: a student without the prompt trains on the teacher's answers.

    python -m recipes.prompt_distillation.create_data
    python -m recipes.prompt_distillation.train
    python -m recipes.prompt_distillation.train file_path=my.jsonl model_name=… log_path=…

Queries are held out by group (a sentence with all its translations). On these the student, which
never sees the prompt, is compared with the teacher's answers and with the right ones, before and
after training. With the defaults (the demo model teaches itself, 44 steps) the teacher with its
prompt is right on 66% of 136 texts. The student without the prompt is right on 0% before and 66%
after training, and 90% of its answers equal the teacher's.
"""

from __future__ import annotations

from functools import partial

import chz

from tinker_cookbook.recipes.prompt_distillation.create_data import run_folder
from tinker_cookbook.recipes.prompt_distillation.data import (
    DistilledDatasetBuilder,
    SplitSettings,
    student_accuracy,
)
from tinker_cookbook.recipes.prompt_distillation.tasks import parse_labels
from tinker_cookbook.recipes.start import DEMO_MODEL, blocking, chat_data, check_files
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.run.jsonl import read_rows
from tinker_cookbook.supervised import train
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(SplitSettings, train.Config):
    """Settings of the student, in addition to those of the loop."""

    recipe_name: str = "prompt_distillation"
    model_name: str = DEMO_MODEL
    labels: str | None = chz.field(
        default=None, doc="Possible answers: a,b; default: the labels of create_data"
    )
    answer_max_tokens: int = number(8, "Maximum tokens of an answer in the evaluation", low=1)
    max_length: int | None = chz.field(
        default=None, doc="Tokens after which examples are cut; default: the model's context"
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="Which messages are trained on"
    )
    batch_size: int = chz.field(default=16, doc="Conversations per step")
    learning_rate: float | None = None  # the recommended rate
    num_epochs: int = 2
    eval_every: int = 100

    def build_dataset(self) -> DistilledDatasetBuilder:
        """Returns the teacher's answers, with a held-out part."""
        makes = "python -m recipes.prompt_distillation.create_data"
        check_files(self, "file_path", hint=f"; make it with: {makes} output_file={self.file_path}")
        # create_data records the labels of its task, so they need not be repeated here.
        recorded = read_rows(run_folder(self.file_path) / "config.json")
        labels = recorded[0]["labels"] if recorded else None
        if self.labels is not None:
            labels = parse_labels(self.labels)
        return DistilledDatasetBuilder(
            common_config=chat_data(self, self.batch_size, self.max_length, self.train_on_what),
            **self.values_of(SplitSettings),
            # The student learns the targets, not the words that the teacher uses for them.
            labels=None if labels is None else sorted(set(labels.values())),
        )

    def resolved(self) -> train.Config:
        """Returns the config of the loop, with the evaluation of the answers."""
        config = super().resolved()
        dataset = config.dataset_builder
        assert isinstance(dataset, DistilledDatasetBuilder)
        # Read now, so that a bad line is refused before anything is loaded. Free text rarely
        # matches word for word, so without labels only test/nll is measured.
        if not dataset.split[1] or dataset.labels is None:
            return config
        accuracy = partial(student_accuracy, dataset, self.answer_max_tokens)
        return chz.replace(
            config,
            evaluator_builders=[*config.evaluator_builders, accuracy],
            # A label has few tokens; free text needs room for some sentences.
            sample_max_tokens=self.answer_max_tokens,
        )


async def main(config: CLIConfig) -> None:
    """Trains the student."""
    await train.main(config)


cli_main = blocking(main)


if __name__ == "__main__":
    run_entrypoint(main)
