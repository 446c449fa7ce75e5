"""Continual learning: use of tools first, then science; what is left of the first task?

    python -m recipes.sdft.run_continual_learning data_dir=FOLDER model_name=…
    python -m recipes.sdft.run_continual_learning data_dir=FOLDER methods=sdft_topk stages=1 …

Each method and learning rate trains on the first task and from there on the second. Both tasks are
evaluated after each stage; ``log_root/results.json`` has the accuracies.
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.sdft.tasks import (
    TASKS,
    Task,
    TaskSettings,
    evaluate,
    train_sdft,
    train_sft,
)
from tinker_cookbook.training.config import check_model, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

Method = Literal["sft", "sdft_topk"]
_STAGES: dict[int, Task] = {1: "tooluse", 2: "science"}


@chz.chz
class ExperimentConfig(TaskSettings):
    """Settings of the experiment. Lists are separated by commas."""

    methods: str = chz.field(default="sft,sdft_topk", doc="sft, sdft_topk")
    learning_rates: str = chz.field(default="5e-4,1e-3", doc="Learning rates of each method")
    stages: str = chz.field(default="1,2", doc="1: use of tools, 2: science, from the end of 1")
    batch_size: int = number(128, "Questions or conversations per step", low=1)
    dry_run: bool = chz.field(default=False, doc="Print the runs and train nothing")
    log_root: str = chz.field(
        default=str(cli_utils.default_log_path("sdft-continual")), doc="Folder of all runs"
    )

    def get_methods(self) -> list[str]:
        """Returns the methods."""
        methods = [part.strip() for part in self.methods.split(",")]
        if wrong := set(methods) - set(get_args(Method)):
            raise ConfigurationError(f"methods: got {wrong.pop()!r}, expected sft or sdft_topk")
        return methods

    def get_learning_rates(self) -> list[float]:
        """Returns the learning rates."""
        return [float(part) for part in self.learning_rates.split(",")]

    def get_stages(self) -> list[int]:
        """Returns the stages in their order."""
        return sorted(int(part) for part in self.stages.split(","))


def run_id(stage: int, method: str, learning_rate: float) -> str:
    """Returns the name of a run and of its folder."""
    return f"stage{stage}_{method}_lr{learning_rate:.0e}"


async def run_single(
    config: ExperimentConfig, method: str, learning_rate: float, stage: int
) -> dict[str, Any]:
    """Trains one stage and evaluates both tasks; returns a row of the results."""
    folder, name = config.root, run_id(stage, method, learning_rate)
    weights = config.load_checkpoint_path
    if stage == 2:
        before = folder / run_id(1, method, learning_rate)
        last = get_last_checkpoint(str(before), "state_path")
        if last is None or not last.final:
            raise ConfigurationError(
                f"stages: {before} has no finished run, from which stage 2 starts; expected "
                "stages=1,2, or the log_root of a finished stage 1"
            )
        weights = last.state_path
    train = train_sft if method == "sft" else train_sdft
    end = await train(
        config,
        _STAGES[stage],
        folder / name,
        config.batch_size,
        learning_rate=learning_rate,
        load_checkpoint_path=weights,
    )
    row: dict[str, Any] = {"run_id": name, "checkpoint_path": end.state_path}
    for task in TASKS:
        row |= await evaluate(config, task, end.sampler_path)
    print_line("  ".join(f"{key} {value}" for key, value in row.items()))
    return row


async def main(config: ExperimentConfig) -> None:
    """Runs all stages, methods and learning rates."""
    runs = [
        (method, rate, stage)
        for stage in config.get_stages()
        for method in config.get_methods()
        for rate in config.get_learning_rates()
    ]
    if config.dry_run:
        for method, rate, stage in runs:
            print_line(f"{run_id(stage, method, rate)}: {_STAGES[stage]}")
        return
    check_model(config)
    rows = [await run_single(config, *run) for run in runs]
    file = config.root / "results.json"
    file.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    print_line(f"written to {file}")


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
