"""Reinforcement learning of calibrated forecasts, with the Brier score as the reward.

    python -m recipes.forecasting.train                       # synthetic markets
    python -m recipes.forecasting.train data=prophet_arena model_name=…
    python -m recipes.forecasting.train data_path=markets.csv split_date=2025-10-20

Training uses markets that closed before ``split_date``, validation uses markets that opened after
it. At the end a calibration table of the validation markets is printed: forecasts and outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence

import chz

from tinker_cookbook.recipes.forecasting.env import (
    CalibrationBin,
    ForecastEvaluator,
    ProphetArenaRLDatasetBuilder,
    evaluator_builder,
)
from tinker_cookbook.recipes.forecasting.settings import MarketSettings
from tinker_cookbook.recipes.start import fill
from tinker_cookbook.rl import train
from tinker_cookbook.rl.settings import RLSettings, rl_config, run
from tinker_cookbook.training.config import check_model, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console


@chz.chz
class Config(MarketSettings, RLSettings):
    """Settings of the recipe, in addition to those of every RL recipe."""

    train_epochs: int = number(3, "Passes over the training markets", low=1)
    validation_group_size: int = number(8, "Forecasts per market in evaluation", low=1)
    group_size: int = chz.field(default=32, doc="Forecasts per market, compared with each other")
    groups_per_batch: int = chz.field(default=16, doc="Markets per step")
    max_tokens: int = chz.field(default=32, doc="Maximum tokens of an answer")
    eval_every: int = number(16, "Steps between evaluations; 0: never")
    save_every: int = number(64, "Steps between checkpoints; 0: never")
    max_steps: int | None = number(128, "Number of steps; 0: only evaluate")


def build_dataset(cli: Config) -> ProphetArenaRLDatasetBuilder:
    """Returns the markets that the settings name; writes the synthetic ones."""
    fixed = {"data_path": cli.csv_file(), "include_validation": False}
    return fill(ProphetArenaRLDatasetBuilder, cli, **fixed)


def build_config(cli: Config, made: list[ForecastEvaluator] | None = None) -> train.Config:
    """Builds the dataset, its evaluator and the config of the run.

    The evaluator is appended to ``made`` when the run begins.
    """
    check_model(cli)
    dataset = build_dataset(cli)
    config = rl_config(cli, "forecasting", dataset)
    builder = evaluator_builder(
        dataset,
        [] if made is None else made,
        max_tokens=config.max_tokens,
        strategy=config.effective_rollout_strategy(),
        temperature=config.eval_temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        config=config.rollouts(),
    )
    return chz.replace(config, evaluator_builders=[*config.evaluator_builders, builder])


def show(table: Sequence[CalibrationBin]) -> None:
    """Prints the calibration."""
    console = get_console()
    console.print("calibration on the validation markets", highlight=False)
    console.print(f"{'forecast':>12}{'number':>9}{'mean':>8}{'resolved YES':>15}", highlight=False)
    for one in table:
        console.print(
            f"{one.low:5.1f} to {one.high:.1f}{one.count:9}{one.mean_forecast:8.2f}"
            f"{one.share_yes:15.2f}",
            highlight=False,
        )


async def cli_main(cfg: Config) -> None:
    """Trains forecasts, and prints how well they are calibrated."""
    made: list[ForecastEvaluator] = []
    await run(cfg, build_config(cfg, made))
    if made and made[-1].last_table:
        show(made[-1].last_table)


main = cli_main


if __name__ == "__main__":
    run_entrypoint(cli_main)
