"""Forecasts markets without sampling text: the forecast is the probability of the token yes.

    python -m recipes.decisions.forecasting              # synthetic markets
    python -m recipes.decisions.forecasting data=prophet_arena model_name=…

Data, time split and metrics are those of ``recipes.forecasting``, where the model writes a number.
Training is supervised, with the Brier score of the outcome as the loss. The Brier reward rises from
0.754 to 0.813 on validation markets (15 minutes on one CPU core).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

import chz
import numpy as np

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.recipes.decisions.decision import (
    ChoiceRendering,
    Decision,
    DecisionRenderer,
    PrefixedChoiceRenderer,
    sample_decision,
)
from tinker_cookbook.recipes.decisions.train import decision_dist_datums, probability_loss
from tinker_cookbook.recipes.forecasting.data import (
    ForecastExample,
    ForecastSplit,
    MarketSettings,
)
from tinker_cookbook.recipes.forecasting.env import (
    brier_reward,
    calibration_error,
    calibration_table,
    print_calibration,
    roc_auc,
)
from tinker_cookbook.recipes.own_loop import run_own_loop, save_step
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.run.loggers import Logger
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import TrainingConfig, check_model, number
from tinker_cookbook.training.server_needs import Need
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import tinker, torch

YES, NO = "yes", "no"
REPLIES: Mapping[str, str] = {YES: "choice#Y", NO: "choice#N"}
ANSWER_FORMAT = "choice#?"
DECISION_TEMPLATE = (
    "Will this market resolve YES? Use only information available through {snapshot_time}.\n"
    "\n"
    "Event:\n"
    "{event_title}\n"
    "\n"
    "Market:\n"
    "{market}\n"
    "\n"
    "Reference material:\n"
    "{reference_material}\n"
    "\n"
    "Resolution criteria:\n"
    "{resolution_criteria}\n"
    "\n"
    "Market close time: {close_time}"
)


def brier_score_loss(choice_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Returns the Brier score of all choices (Brier 1950): the sum of squared differences."""
    return (choice_probs - target_probs).square().sum()


class YesNoChoiceRenderer(PrefixedChoiceRenderer):
    """Replies ``choice#Y`` and ``choice#N`` for the labels yes and no."""

    def render_choices(self, labels: Sequence[str]) -> ChoiceRendering:
        """Returns the replies."""
        return self.with_ids({label: REPLIES[label][-1] for label in labels})


@chz.chz
class Config(MarketSettings, TrainingConfig):
    """Settings of the recipe."""

    model_name: str = DEMO_MODEL
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = "ask"
    batch_size: int = number(32, "Markets per step", low=1)
    epochs: int = number(1, "Passes over the training markets", low=1)
    learning_rate: float | None = None
    eval_every: int = number(16, "Steps between evaluations; 0: only at both ends")
    save_every: int = number(0, "Steps between checkpoints; 0: only the final one")
    log_path: str = chz.field(
        default=str(cli_utils.default_log_path("decisions_forecasting")), doc="Folder of this run"
    )


def forecast_decision(example: ForecastExample) -> Decision:
    """Returns the question, without the outcome and without prices."""
    text = DECISION_TEMPLATE.format(
        snapshot_time=f"{example.snapshot_time:%Y-%m-%d}",
        event_title=example.event_title,
        market=example.market,
        reference_material=example.reference_material,
        resolution_criteria=example.resolution_criteria,
        close_time=f"{example.close_time:%Y-%m-%d}",
    )
    return Decision(text, [(YES, "It resolves YES."), (NO, "It resolves NO.")])


async def forecasts_of(
    sampling_client: SamplingClient,
    decision_renderer: DecisionRenderer,
    examples: Sequence[ForecastExample],
) -> list[tuple[float, int]]:
    """Returns the probability of yes and the outcome of each market."""
    renderings = [decision_renderer.render(forecast_decision(one)) for one in examples]
    found = await asyncio.gather(*(sample_decision(sampling_client, one) for one in renderings))
    return [(p[YES], one.outcome) for p, one in zip(found, examples, strict=True)]


async def evaluate_forecasts(
    sampling_client: SamplingClient,
    decision_renderer: DecisionRenderer,
    examples: Sequence[ForecastExample],
) -> dict[str, float]:
    """Returns Brier reward, accuracy, calibration error and, with both outcomes, AUC.

    Prints the calibration.
    """
    pairs = await forecasts_of(sampling_client, decision_renderer, examples)
    table = calibration_table(pairs)
    print_calibration(table)
    right = [0.5 if p == 0.5 else float((p > 0.5) == bool(y)) for p, y in pairs]
    metrics = {
        "brier_reward": float(np.mean([brier_reward(p, y) for p, y in pairs])),
        "accuracy": float(np.mean(right)),
        "calibration_error": calibration_error(table),
    }
    auc = roc_auc(pairs)
    return metrics if auc is None else {**metrics, "auc": auc}


async def train(
    cfg: Config,
    *,
    training_client: TrainingClient,
    decision_renderer: DecisionRenderer,
    train_examples: Sequence[tuple[Decision, str]],
    validation: Sequence[ForecastExample],
    ml_logger: Logger,
    log_path: str,
    start_step: int = 0,
) -> None:
    """Trains on decisions with their outcomes, and evaluates."""
    cfg = chz.replace(cfg, log_path=log_path)
    total = _count_steps(cfg, train_examples)
    loss = probability_loss(brier_score_loss)

    async def evaluate() -> dict[str, float]:
        client = await training_client.save_weights_and_get_sampling_client()
        found = await evaluate_forecasts(client, decision_renderer, validation)
        return {f"test/{name}": value for name, value in found.items()}

    if start_step == 0:
        ml_logger.log_metrics(await evaluate(), step=0)
    for step in range(start_step, total):
        began = time.monotonic()
        at = step % _steps_per_epoch(cfg, train_examples) * cfg.batch_size
        batch = [
            (decision, {label: 1.0}) for decision, label in train_examples[at : at + cfg.batch_size]
        ]
        data = decision_dist_datums(decision_renderer, batch)
        rate = cfg.rate * (1 - step / total)
        submitted = training_client.forward_backward_custom(data, loss)
        updated = training_client.optim_step(tinker.AdamParams(learning_rate=rate))
        result, _ = await submitted, await updated
        names = ("loss", "target_prob:mean", "accuracy")
        row = {f"train/{name}": float(result.metrics[name]) for name in names}
        row |= {"learning_rate": rate, "time/total": time.monotonic() - began}
        done = step + 1
        if done == total or (cfg.eval_every and done % cfg.eval_every == 0):
            row |= await evaluate()
        ml_logger.log_metrics(row, step=done)
        await asyncio.to_thread(save_step, training_client, cfg, done, total)


def _steps_per_epoch(cfg: Config, train_examples: Sequence[object]) -> int:
    return math.ceil(len(train_examples) / cfg.batch_size)


def _count_steps(cfg: Config, train_examples: Sequence[object]) -> int:
    per_epoch = _steps_per_epoch(cfg, train_examples)
    return per_epoch * cfg.epochs if cfg.max_steps is None else cfg.max_steps


def _run(
    cfg: Config, client: TrainingClient, split: ForecastSplit, logger: Logger, steps: range
) -> None:
    renderer = get_renderer(cfg.renderer, get_tokenizer(cfg.model_name))
    examples = [(forecast_decision(one), YES if one.outcome else NO) for one in split.train]
    asyncio.run(
        train(
            cfg,
            training_client=client,
            decision_renderer=DecisionRenderer(renderer, YesNoChoiceRenderer(renderer)),
            train_examples=examples,
            validation=split.validation,
            ml_logger=logger,
            log_path=cfg.log_path,
            start_step=steps.start,
        )
    )


def main(cfg: Config) -> None:
    """Trains forecasts as decisions."""
    check_model(cfg)
    need = Need("custom_loss", "the Brier score")
    run_own_loop(cfg, Config.split, lambda _, split: _count_steps(cfg, split.train), _run, [need])


if __name__ == "__main__":
    run_entrypoint(main)
