"""Few-shot image classifiers: a run for each dataset and number of images per class.

    python -m recipes.vlm_classifier.sweep experiment_dir=FOLDER examples_per_class=1,4,16

The same command again continues runs that were interrupted. ``eval_sweep`` compares the runs.
"""

from __future__ import annotations

import multiprocessing
import shlex
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.vlm_classifier import train
from tinker_cookbook.training.config import number
from tinker_cookbook.training.lr_scheduling import LRSchedule
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line

EXAMPLES_TO_MULTIPLIER = {16: 1, 8: 2, 4: 4, 2: 8, 1: 16}
"""Images per class -> factor of the number of passes, so that all runs have as many steps."""


@chz.chz
class ExperimentConfig(train.ExperimentConfig):
    """Settings of one run, with the defaults of few-shot runs."""

    recipe_name: str = "vlm_classifier_sweep"
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = "resume"
    num_epochs: int = 1
    num_repeats: float = 10
    save_every: int | None = 50
    eval_every: int = 50
    run_nll_evaluator: bool = False
    n_eval: int | None = 256


@chz.chz
class SweepConfig(ExperimentConfig):
    """Settings of the sweep, in addition to those of its runs. Lists are separated by commas."""

    datasets: list[str] = chz.field(default_factory=lambda: ["digits"], doc="Datasets")
    examples_per_class: list[int] = chz.field(  # type: ignore[assignment]
        default_factory=lambda: [1, 2, 4, 8, 16], doc="Training images per class"
    )
    lr_schedule: LRSchedule = "constant"
    num_parallel: int = number(1, "Runs at the same time, each in a process with its engine", low=1)


def run_experiment(experiment_config: ExperimentConfig) -> None:
    """Trains one classifier of a sweep."""
    train.run_experiment(experiment_config)


def experiments(config: SweepConfig) -> list[ExperimentConfig]:
    """Returns the settings of all runs."""
    points = product(config.datasets, config.examples_per_class)
    return [
        ExperimentConfig(
            **config.values_of(ExperimentConfig)
            | {
                "dataset": dataset,
                "examples_per_class": count,
                "num_repeats": config.num_repeats * EXAMPLES_TO_MULTIPLIER.get(count, 16 / count),
                "session_name": config.session_name
                and f"{config.session_name}-{dataset}-{count}shot",
            }
        )
        for dataset, count in points
    ]


def run_sweep(sweep_config: SweepConfig) -> None:
    """Trains all classifiers of the sweep, ``num_parallel`` at the same time."""
    runs = experiments(sweep_config)
    if sweep_config.num_parallel == 1:
        for run in runs:
            run_experiment(run)
    else:
        # Not "fork": threads of torch and of the SDK do not survive it.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(sweep_config.num_parallel, mp_context=context) as pool:
            list(pool.map(run_experiment, runs))
    folder = shlex.quote(sweep_config.experiment_dir)
    command = f"python -m recipes.vlm_classifier.eval_sweep experiment_dir={folder}"
    print_line(f"{len(runs)} runs finished; compare them: {command} output_file=accuracies.json")


if __name__ == "__main__":
    run_entrypoint(run_sweep)
