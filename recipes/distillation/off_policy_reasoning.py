"""Off-policy distillation: training on texts or token distributions of a larger model.

    python -m recipes.distillation.off_policy_reasoning dataset_path=answers.jsonl
    python -m recipes.distillation.off_policy_reasoning teacher_model=… n_teacher_targets=20 …
    python -m recipes.distillation.off_policy_reasoning dataset=openthoughts3 model_name=… \\
        batch_size=128 lora_rank=128 learning_rate=1e-3 max_length=16384

Without ``teacher_model`` the texts are the targets: answers of a large model, such as those of
OpenThoughts3 (streamed from the Hub) or of a user file. With ``teacher_model`` (and, for a
trained teacher, ``teacher_checkpoint``) the targets at every token are the ``n_teacher_targets``
most probable tokens of the teacher with their probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import chz

from tinker_cookbook import model_info
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes import sl_basic
from tinker_cookbook.recipes.start import chat_data, check_one_of
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.batch_loop import BatchConfig
from tinker_cookbook.supervised.conversation_row import read_row, with_tools
from tinker_cookbook.supervised.data import (
    StreamingSupervisedDatasetFromHFDataset,
    conversation_to_data,
)
from tinker_cookbook.supervised.hf_datasets import stream_hf_dataset
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    SupervisedDataset,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker

OPEN_THOUGHTS = "open-thoughts/OpenThoughts3-1.2M"


@chz.chz
class CLIConfig(sl_basic.CLIConfig):
    """Settings of the recipe, in addition to those of ``sl_basic``."""

    recipe_name: str = "off_policy_reasoning"
    dataset: str = chz.field(
        default="example", doc=f"One of openthoughts3, {', '.join(sl_basic.DATASETS)}"
    )
    max_prompts: int = chz.field(default=384_000, doc="openthoughts3: rows per epoch")
    buffer_size: int = chz.field(default=384_000, doc="openthoughts3: rows to shuffle among")
    teacher_model: str | None = chz.field(
        default=None, doc="Teacher whose token distributions are the targets; default: the texts"
    )
    teacher_checkpoint: str | None = weights_field(
        "sampler_weights", "The teacher's own weights on teacher_model"
    )
    n_teacher_targets: int = chz.field(
        default=20, doc="Most probable tokens of the teacher at a position that are targets"
    )
    teacher_concurrency: int = chz.field(
        default=64, doc="Examples that the teacher scores concurrently"
    )

    def build_dataset(self) -> ChatDatasetBuilder:
        """Returns the texts."""
        length = self.max_length
        if self.teacher_model is not None and length is None:
            # The longest example that fits both contexts. The teacher samples one token after it.
            length = model_info.resolve_max_length(self.model_name, None)
            context = model_info.resolve_max_length(self.teacher_model, None)
            if context is not None:
                length = context - 1 if length is None else min(length, context - 1)
        if self.dataset != "openthoughts3":
            return super(CLIConfig, chz.replace(self, max_length=length)).build_dataset()
        check_one_of(dataset=self.dataset, dataset_path=self.dataset_path, test_path=self.test_path)
        return OpenThoughts3Builder(
            common_config=chat_data(self, self.batch_size, length, self.train_on_what),
            buffer_size=self.buffer_size,
            max_prompts=self.max_prompts,
        )

    def with_teacher(self) -> train_off_policy.Config:
        """Returns the config of training on the distributions of ``teacher_model``."""
        if self.teacher_model is None:
            raise ConfigurationError(
                f"teacher_checkpoint: got {self.teacher_checkpoint} without teacher_model, "
                "expected also the base model that these weights were trained on"
            )
        # The texts are the same, and the teacher's distributions are the targets.
        texts = self.resolved()
        teacher = TeacherConfig(
            base_model=self.teacher_model, load_checkpoint_path=self.teacher_checkpoint
        )
        part = train_off_policy.DatasetWithTeacher(
            dataset_builder=texts.dataset_builder, teacher_config=teacher
        )
        shared = texts.values_of(BatchConfig) | {
            "behavior_if_log_dir_exists": self.behavior_if_log_dir_exists,
            "dataset_builder": None,
        }
        return train_off_policy.Config(
            dataset_configs=[part],
            n_teacher_targets=self.n_teacher_targets,
            teacher_concurrency=self.teacher_concurrency,
            batch_size=self.batch_size,
            **shared,
        )


@chz.chz
class OpenThoughts3Builder(ChatDatasetBuilder):
    """OpenThoughts3: 1.2 million problems with the reasoning and answers of a large model."""

    path: str = chz.field(default=OPEN_THOUGHTS, doc="Hub name, or folder or file of a copy")
    buffer_size: int = chz.field(default=384_000, doc="Rows to shuffle among")
    max_prompts: int = chz.field(default=384_000, doc="Rows per epoch")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Opens the stream; there is no held-out part."""
        self.common_config.check()

        def to_data(row: Mapping[str, Any]) -> list[tinker.Datum]:
            messages, tools = read_row(row, "the conversation", "conversations")
            return conversation_to_data(
                with_tools(messages, tools, self.renderer),
                self.renderer,
                self.common_config.max_length,
                self.train_on_what,
            )

        train_set = StreamingSupervisedDatasetFromHFDataset(
            stream_hf_dataset(self.path, "train"),
            self.common_config.batch_size,
            # A stream has no length, but schedules need the number of steps.
            length=self.max_prompts,
            flatmap_fn=to_data,
            buffer_size=self.buffer_size,
        )
        return train_set, None


async def main(config: CLIConfig) -> None:
    """Trains a model on the outputs of another one."""
    if config.teacher_model is None and config.teacher_checkpoint is None:
        await train.main(config)
    else:
        await train_off_policy.main(await asyncio.to_thread(config.with_teacher))


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
