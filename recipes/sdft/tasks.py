"""The SDFT paper's two tasks, use of tools and science: training by two methods, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.checkpoint_utils import CheckpointRecord, get_last_checkpoint
from tinker_cookbook.distillation import sdft
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.recipes.sdft.datasets import (
    ScienceArrowSFTBuilder,
    SDFTDataset,
    TooluseArrowSFTBuilder,
    load_science_from_arrow,
    load_tooluse_from_arrow,
)
from tinker_cookbook.recipes.sdft.eval import SciKnowEvalEvaluator, ToolUseEvaluator
from tinker_cookbook.recipes.start import DEMO_MODEL, chat_data
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.supervised import train as sl_train
from tinker_cookbook.tokenizer_utils import get_tokenizer

Task = Literal["science", "tooluse"]
TASKS: tuple[Task, ...] = ("science", "tooluse")


@chz.chz
class TaskSettings(sdft.Config):
    """Settings of training on the tasks."""

    model_name: str = DEMO_MODEL
    lora_rank: int = 32
    data_dir: str = chz.field(
        default="~/Repos/Self-Distillation/data",
        doc="Folder of the paper's data: science_data and tooluse_data, each with train_data and "
        "eval_data (JSONL, parquet, or what Dataset.save_to_disk writes)",
    )
    thinking_format: bool = chz.field(
        default=False, doc="science: reasoning as thinking, for models that think"
    )
    log_root: str = chz.field(doc="Folder of all trainings and results")
    log_path: str = chz.field(
        default="", doc="Has no effect: each training has a folder in log_root"
    )
    eval_every: int = 0
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = chz.field(
        default="resume", doc="ask, resume, delete or raise, for the folder of each training"
    )

    @property
    def root(self) -> Path:
        """Folder of all trainings."""
        return Path(self.log_root).expanduser()

    def folder_of(self, task: Task) -> str:
        """Returns the folder of a task's data."""
        return f"{self.data_dir}/{task}_data"


async def train_sft(
    cli: TaskSettings, task: Task, log_path: Path, batch_size: int, **settings: Any
) -> CheckpointRecord:
    """Trains on the golden answers; returns the final checkpoint."""
    common: dict[str, Any] = {
        "common_config": chat_data(cli, batch_size, cli.max_tokens),
        "data_dir": cli.folder_of(task),
    }
    dataset = (
        ScienceArrowSFTBuilder(**common, thinking_format=cli.thinking_format)
        if task == "science"
        else TooluseArrowSFTBuilder(**common)
    )
    made = {
        "log_path": str(log_path),
        "dataset_builder": dataset,
        "show_samples": 0,
        "behavior_if_log_dir_exists": cli.behavior_if_log_dir_exists,
    }
    await sl_train.main(cli.for_loop(sl_train.Config, "sdft_benchmark_sft", **(made | settings)))
    return _final(log_path)


async def train_sdft(
    cli: TaskSettings, task: Task, log_path: Path, batch_size: int, **settings: Any
) -> CheckpointRecord:
    """Trains on the teacher with the golden answers in its prompt; returns the final checkpoint."""
    folder = cli.folder_of(task)
    questions, golden, *_ = (
        load_science_from_arrow(folder, cli.thinking_format)
        if task == "science"
        else load_tooluse_from_arrow(folder)
    )
    renderer = get_renderer(cli.renderer, get_tokenizer(cli.model_name))
    data = SDFTDataset(questions, golden, batch_size, cli.group_size, renderer, f"sdft_{task}")
    made: dict[str, Any] = {
        "recipe_name": "sdft_benchmark",
        "log_path": str(log_path),
        "renderer_name": cli.renderer,
    }
    config = sdft.Config(**(cli.values_of(sdft.Config) | made | settings))
    await sdft.main(config, sdft_dataset=data)
    return _final(log_path)


def _final(log_path: Path) -> CheckpointRecord:
    last = get_last_checkpoint(str(log_path), "sampler_path")
    assert last is not None, f"{log_path}: a run that ended has a checkpoint"
    return last


def evaluator_of(cli: TaskSettings, task: Task, renderer: Renderer) -> SamplingClientEvaluator:
    """Returns the paper's evaluation of a task."""
    folder, most = cli.folder_of(task), cli.max_tokens
    if task == "science":
        *_, prompts, letters = load_science_from_arrow(folder, cli.thinking_format)
        return SciKnowEvalEvaluator(prompts, letters, renderer, most)
    *_, texts, golden = load_tooluse_from_arrow(folder)
    return ToolUseEvaluator(texts, golden, renderer, most)


async def evaluate(cli: TaskSettings, task: Task, model_path: str | None) -> dict[str, float]:
    """Returns the accuracy of a checkpoint, or of the base model."""
    settings = SamplingModelSettings.of(
        cli,
        model_path=model_path,
        model_name=None if model_path else cli.model_name,
        renderer_name=cli.renderer,
    )
    with settings.connect() as connection:
        model = await open_sampling_model(connection, settings)
        return await evaluator_of(cli, task, model.renderer)(model.client)
