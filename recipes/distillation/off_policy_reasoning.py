"""Off-policy distillation: learning from texts that somebody else wrote.

    python -m recipes.distillation.off_policy_reasoning dataset_path=answers.jsonl
    python -m recipes.distillation.off_policy_reasoning teacher_model=… n_teacher_targets=20 …
    python -m recipes.distillation.off_policy_reasoning dataset=openthoughts3 model_name=… \\
        batch_size=128 lora_rank=128 learning_rate=1e-3 max_length=16384

Without a teacher at hand the texts themselves are the targets: answers of a large model, such as
those of OpenThoughts3 (streamed from the Hub) or of a file of yours. With ``teacher_model`` (and
``teacher_checkpoint``, the weights it was trained to) a teacher gives at every token the
``n_teacher_targets`` tokens that it finds most probable there, and the student learns these
distributions: more from each text, and what the teacher thinks rather than what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook import cli_utils, hyperparam_utils, model_info
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.recipes import sl_basic
from tinker_cookbook.recipes.start import start
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import (
    StreamingSupervisedDatasetFromHFDataset,
    conversation_to_data,
)
from tinker_cookbook.supervised.hf_datasets import stream_hf_dataset
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
)
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

if TYPE_CHECKING:
    import tinker

OPEN_THOUGHTS = "open-thoughts/OpenThoughts3-1.2M"
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@chz.chz
class CLIConfig(sl_basic.CLIConfig):
    """Settings of the recipe; what is None is derived from the models and printed."""

    dataset: str = chz.field(
        default="example", doc=f"One of openthoughts3, {', '.join(sl_basic.DATASETS)}"
    )
    max_prompts: int = chz.field(default=384_000, doc="openthoughts3: rows that an epoch takes")
    buffer_size: int = chz.field(default=384_000, doc="openthoughts3: rows to shuffle among")
    teacher_model: str | None = chz.field(
        default=None, doc="Teacher whose token distributions are the targets; default: the texts"
    )
    teacher_checkpoint: str | None = chz.field(
        default=None, doc="tinker:// path of the teacher's own weights on teacher_model"
    )
    n_teacher_targets: int = chz.field(
        default=20, doc="Most probable tokens of the teacher at a position that are targets"
    )
    teacher_concurrency: int = chz.field(default=64, doc="Examples the teacher scores at a time")
    log_path: str = chz.field(
        default=cli_utils.default_log_path("off_policy_reasoning"), doc="Folder of this run"
    )


@chz.chz
class OpenThoughts3Builder(ChatDatasetBuilder):
    """OpenThoughts3: 1.2 million problems with the reasoning and answers of a large model."""

    buffer_size: int = chz.field(default=384_000, doc="Rows to shuffle among")
    max_prompts: int = chz.field(default=384_000, doc="Rows that an epoch takes")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Opens the stream; there is no held-out part."""
        self.common_config.check()

        def to_data(row: Mapping[str, Any]) -> list[tinker.Datum]:
            return conversation_to_data(
                messages_of(row), self.renderer, self.common_config.max_length, self.train_on_what
            )

        train_set = StreamingSupervisedDatasetFromHFDataset(
            stream_hf_dataset(OPEN_THOUGHTS, "train"),
            self.common_config.batch_size,
            length=self.max_prompts,
            flatmap_fn=to_data,
            buffer_size=self.buffer_size,
        )
        return train_set, None


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """The conversation of a row like ``{"conversations": [{"from": "human", "value": "…"}]}``."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(turn.get("from") in _ROLES for turn in turns):
        raise DataFormatError(
            f"conversations: got {str(turns)[:80]}, expected a list of turns from "
            f"{', '.join(_ROLES)}"
        )
    return [Message(role=_ROLES[turn["from"]], content=turn["value"]) for turn in turns]


def build_config(cli: CLIConfig) -> train.Config | train_off_policy.Config:
    """Fills in what is derived from the models."""
    check_model(cli)
    _check_teacher_settings(cli)
    renderer_name, _ = model_info.resolve_renderer_name(
        cli.model_name, cli.renderer_name, cli.log_path
    )
    learning_rate = cli.learning_rate
    if learning_rate is None:
        learning_rate = hyperparam_utils.get_lr(cli.model_name)
    dataset = _build_dataset(cli, renderer_name, _max_length(cli))
    settings: dict[str, Any] = dict(
        log_path=cli.log_path,
        model_name=cli.model_name,
        renderer_name=renderer_name,
        recipe_name="off_policy_reasoning",
        learning_rate=learning_rate,
        submit_ahead=cli.submit_ahead,
        show_samples=cli.show_samples,
        **cli.shared(),
    )
    if cli.teacher_model is None:
        return train.Config(dataset_builder=dataset, **settings)
    teacher = TeacherConfig(
        base_model=cli.teacher_model, load_checkpoint_path=cli.teacher_checkpoint
    )
    return train_off_policy.Config(
        dataset_configs=[
            train_off_policy.DatasetWithTeacher(dataset_builder=dataset, teacher_config=teacher)
        ],
        n_teacher_targets=cli.n_teacher_targets,
        teacher_concurrency=cli.teacher_concurrency,
        batch_size=cli.batch_size,
        **settings,
    )


def _check_teacher_settings(cli: CLIConfig) -> None:
    if cli.teacher_checkpoint is not None and cli.teacher_model is None:
        raise ConfigurationError(
            f"teacher_checkpoint: got {cli.teacher_checkpoint} without teacher_model, expected "
            "the base model that these weights were trained on beside it"
        )


def _max_length(cli: CLIConfig) -> int | None:
    """The setting, or the longest example that student and teacher can read."""
    length = model_info.resolve_max_length(cli.model_name, cli.max_length)
    if cli.teacher_model is None or cli.max_length is not None:
        return length
    context = model_info.resolve_max_length(cli.teacher_model, None)
    if context is None:
        return length
    return context - 1 if length is None else min(length, context - 1)


def _build_dataset(
    cli: CLIConfig, renderer_name: str, max_length: int | None
) -> ChatDatasetBuilder:
    if cli.dataset != "openthoughts3":
        return sl_basic.build_dataset(cli, renderer_name, max_length)
    for name in ("dataset_path", "test_path"):
        if getattr(cli, name) is not None:
            raise ConfigurationError(
                f"{name}={getattr(cli, name)} and dataset={cli.dataset} contradict each other; "
                "leave one out"
            )
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=cli.model_name,
        renderer_name=renderer_name,
        max_length=max_length,
        batch_size=cli.batch_size,
        train_on_what=cli.train_on_what,
    )
    return OpenThoughts3Builder(
        common_config=common, buffer_size=cli.buffer_size, max_prompts=cli.max_prompts
    )


async def main(config: CLIConfig) -> None:
    """Trains a model on what another one wrote or would have written."""
    run = build_config(config)
    if isinstance(run, train_off_policy.Config):
        await start(run, config.behavior_if_log_dir_exists, train_off_policy.main)
    else:
        await start(run, config.behavior_if_log_dir_exists, train.main)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
