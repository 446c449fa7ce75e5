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

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook import cli_utils, model_info
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes import sl_basic
from tinker_cookbook.recipes.start import fill, recommended_lr, resolve, start
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.conversation_row import UnreadKeys, read_row, with_tools
from tinker_cookbook.supervised.data import (
    StreamingSupervisedDatasetFromHFDataset,
    conversation_to_data,
)
from tinker_cookbook.supervised.hf_datasets import stream_hf_dataset
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    SupervisedDataset,
)
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.checkpoints.weights_paths import weights_field
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

if TYPE_CHECKING:
    import tinker

OPEN_THOUGHTS = "open-thoughts/OpenThoughts3-1.2M"


@chz.chz
class CLIConfig(sl_basic.CLIConfig):
    """Settings of the recipe. Options that are None are derived from the models and printed."""

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
    log_path: str = chz.field(
        default=cli_utils.default_log_path("off_policy_reasoning"), doc="Folder of this run"
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

        unread = UnreadKeys()

        def to_data(row: Mapping[str, Any]) -> list[tinker.Datum]:
            messages, tools = read_row(row, "the conversation", unread, "conversations")
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


def build_config(cli: CLIConfig) -> train.Config | train_off_policy.Config:
    """Builds the dataset, the teacher if there is one, and the config of the run."""
    check_model(cli)
    if cli.teacher_checkpoint is not None and cli.teacher_model is None:
        raise ConfigurationError(
            f"teacher_checkpoint: got {cli.teacher_checkpoint} without teacher_model, expected "
            "also the base model that these weights were trained on"
        )
    length = model_info.resolve_max_length(cli.model_name, cli.max_length)
    if cli.teacher_model is not None and cli.max_length is None:
        # The longest example that fits both contexts. The teacher samples one token after it.
        context = model_info.resolve_max_length(cli.teacher_model, None)
        if context is not None:
            length = context - 1 if length is None else min(length, context - 1)
    common = cli.chat_data(cli.batch_size, length, cli.train_on_what)
    if cli.dataset == "openthoughts3":
        for name in ("dataset_path", "test_path"):
            if getattr(cli, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(cli, name)} and dataset={cli.dataset} contradict each other; "
                    "leave one out"
                )
        dataset: ChatDatasetBuilder = fill(OpenThoughts3Builder, cli, common_config=common)
    else:
        dataset = sl_basic.build_dataset(cli, common)
    name, learning_rate = "off_policy_reasoning", recommended_lr(cli.model_name, cli.learning_rate)
    if cli.teacher_model is None:
        return resolve(
            train.Config, cli, name, dataset_builder=dataset, learning_rate=learning_rate
        )
    # With a teacher the texts are the same, and its distributions are the targets.
    teacher = TeacherConfig(
        base_model=cli.teacher_model, load_checkpoint_path=cli.teacher_checkpoint
    )
    part = train_off_policy.DatasetWithTeacher(dataset_builder=dataset, teacher_config=teacher)
    return resolve(
        train_off_policy.Config, cli, name, dataset_configs=[part], learning_rate=learning_rate
    )


async def main(config: CLIConfig) -> None:
    """Trains a model on the outputs of another one."""
    run = build_config(config)
    if isinstance(run, train_off_policy.Config):
        await start(run, config.behavior_if_log_dir_exists, train_off_policy.main)
    else:
        await start(run, config.behavior_if_log_dir_exists, train.main)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
