"""Compares supervised training with self-distillation, each from the same base model.

    python -m recipes.sdft.benchmark data_dir=FOLDER model_name=…
    python -m recipes.sdft.benchmark data_dir=FOLDER phase=eval_checkpoint checkpoint_path=tinker://…

The accuracies are written to ``log_root/benchmark_summary_DATASET.json``. A training that is
finished is not repeated.
"""

from __future__ import annotations

import json
from typing import Literal

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.sdft.tasks import Task, TaskSettings, evaluate, train_sdft, train_sft
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.training.config import check_model, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

Phase = Literal["all", "base_eval", "sft", "sdft", "eval_checkpoint"]


@chz.chz
class BenchmarkConfig(TaskSettings):
    """Settings of the comparison."""

    dataset: Task = chz.field(default="science", doc="science or tooluse")
    phase: Phase = chz.field(
        default="all", doc="all, base_eval, sft, sdft or eval_checkpoint, with checkpoint_path"
    )
    checkpoint_path: str | None = weights_field("sampler_weights", "Checkpoint to evaluate")
    learning_rate: float = chz.field(default=2e-5, doc="Rate of self-distillation")
    groups_per_batch: int = number(32, "Questions per step of self-distillation", low=1)
    sft_learning_rate: float = chz.field(default=2e-5, doc="Rate of supervised training")
    sft_batch_size: int = number(32, "Conversations per step of supervised training", low=1)
    sft_max_steps: int | None = number(None, "Steps of supervised training; default: one epoch")
    log_root: str = chz.field(
        default=str(cli_utils.default_log_path("sdft-benchmark")), doc="Folder of all phases"
    )


async def main(config: BenchmarkConfig) -> None:
    """Runs the selected phases and writes their accuracies."""
    if (config.phase == "eval_checkpoint") != (config.checkpoint_path is not None):
        raise ConfigurationError(
            f"checkpoint_path: got {config.checkpoint_path} with phase={config.phase}, expected a "
            "tinker:// path with phase=eval_checkpoint, and only with it"
        )
    check_model(config)
    task, folder = config.dataset, config.root
    found: dict[str, dict[str, float]] = {}

    async def measure(name: str, path: str | None) -> None:
        found[name] = await evaluate(config, task, path)
        print_line("  ".join([f"{name:10}", *(f"{k} {v:.4g}" for k, v in found[name].items())]))

    if config.phase in ("all", "base_eval"):
        await measure("base", None)
    if config.phase in ("all", "sft"):
        end = await train_sft(
            config,
            task,
            folder / f"{task}-sft",
            config.sft_batch_size,
            learning_rate=config.sft_learning_rate,
            max_steps=config.sft_max_steps,
        )
        await measure("sft", end.sampler_path)
    if config.phase in ("all", "sdft"):
        end = await train_sdft(config, task, folder / f"{task}-sdft", config.groups_per_batch)
        await measure("sdft", end.sampler_path)
    if config.phase == "eval_checkpoint":
        await measure("checkpoint", config.checkpoint_path)
    file = folder / f"benchmark_summary_{task}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print_line(f"written to {file}")


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
