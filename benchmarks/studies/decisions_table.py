"""Trains a model on a generated table whose probabilities are known exactly.

    python benchmarks/studies/decisions_table.py
    python benchmarks/studies/decisions_table.py loss=cross_entropy soft=true

Each cell of the table (a day and a weather) has its own probabilities of the choices. The training
data are outcomes that are sampled from them or, with ``soft``, the probabilities themselves. The
expectation of a proper scoring rule is lowest at the true probabilities, so the model must converge
to them: ``test/max_error`` goes to 0, and ``test/brier`` to ``test/brier_bound``, the score of the
true probabilities.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Literal

import chz
import numpy as np

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.decisions.decision import (
    Decision,
    DecisionRenderer,
    sample_decision,
)
from tinker_cookbook.recipes.decisions.forecasting import brier_score_loss
from tinker_cookbook.recipes.decisions.train import (
    decision_choice_datums,
    decision_dist_datums,
    probability_loss,
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
from tinker_cookbook.utils.terminal import get_console

DAYS = ("Monday", "Friday", "Sunday")
WEATHERS = ("rain", "sun", "snow", "wind")
CHOICES = ("walk", "bus", "bike")

ScoringRule = Literal["brier", "cross_entropy"]


@chz.chz
class CLIConfig(TrainingConfig):
    """Settings of the recipe."""

    model_name: str = DEMO_MODEL
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = "ask"
    loss: ScoringRule = chz.field(default="brier", doc="brier or cross_entropy")
    soft: bool = chz.field(
        default=False, doc="Train on the probabilities instead of sampled outcomes"
    )
    batch_size: int = number(12, "Decisions per step; the table has 12", low=1)
    max_steps: int = number(100, "Number of steps", low=1)
    learning_rate: float | None = None
    eval_every: int = number(20, "Steps between comparisons with the table; 0: only at the end")
    log_path: str = chz.field(
        default=str(cli_utils.default_log_path("decisions_table")), doc="Folder of this run"
    )


@dataclass(frozen=True)
class Cell:
    """A question and the true probability of each choice."""

    decision: Decision
    probabilities: dict[str, float]


def make_table(seed: int) -> list[Cell]:
    """Returns one cell for each day and weather; its probabilities depend on the seed only."""
    rng = np.random.default_rng(seed)
    cells = []
    for day in DAYS:
        for weather in WEATHERS:
            # Alpha 1: all probabilities of three choices are equally likely.
            values = rng.dirichlet(np.ones(len(CHOICES)))
            text = f"How does Tom go? It is {day}. There is {weather}."
            probabilities = {str(n): float(v) for n, v in zip(CHOICES, values, strict=True)}
            cells.append(Cell(Decision(text, [(name, "") for name in CHOICES]), probabilities))
    return cells


def cross_entropy(choice_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy over the choices, for soft targets."""
    return -(target_probs * choice_probs.clamp_min(1e-12).log()).sum()


async def compare(
    client: SamplingClient, renderer: DecisionRenderer, table: list[Cell]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Returns metrics of the learned probabilities against the table's, and the learned ones."""
    found = await asyncio.gather(
        *(sample_decision(client, renderer.render(cell.decision)) for cell in table)
    )
    learned = np.array([[one[name] for name in CHOICES] for one in found])
    true = np.array([[cell.probabilities[name] for name in CHOICES] for cell in table])
    # Expected over outcomes of the true probabilities.
    bound = 1 - (true**2).sum(1).mean()
    return {
        "test/max_error": float(np.abs(learned - true).max()),
        "test/mean_error": float(np.abs(learned - true).mean()),
        "test/kl": float((true * np.log(true / learned.clip(1e-12))).sum(1).mean()),
        "test/brier": float(bound + ((learned - true) ** 2).sum(1).mean()),
        "test/brier_bound": float(bound),
    }, list(found)


def make_batch(cli: CLIConfig, table: list[Cell], step: int) -> list[tuple[Cell, str | None]]:
    """Returns cells in turn, each with a sampled outcome; the same for a step each time."""
    rng = random.Random(f"{cli.seed}-{step}")
    cells = [table[i % len(table)] for i in range(cli.batch_size)]
    if cli.soft:
        return [(cell, None) for cell in cells]
    names = list(CHOICES)
    return [
        (cell, rng.choices(names, [cell.probabilities[name] for name in names])[0])
        for cell in cells
    ]


def train_on(
    client: TrainingClient,
    renderer: DecisionRenderer,
    batch: list[tuple[Cell, str | None]],
    loss: ScoringRule,
) -> tinker.types.ForwardBackwardOutput:
    """Adds the gradient of one batch."""
    outcomes = [(cell.decision, outcome) for cell, outcome in batch if outcome is not None]
    # Against the whole vocabulary, so that the format is learned too.
    if loss == "cross_entropy" and outcomes:
        return client.forward_backward(
            decision_choice_datums(renderer, outcomes), "cross_entropy"
        ).result()
    targets = [
        (cell.decision, cell.probabilities if outcome is None else {outcome: 1.0})
        for cell, outcome in batch
    ]
    function = brier_score_loss if loss == "brier" else cross_entropy
    data = decision_dist_datums(renderer, targets)
    return client.forward_backward_custom(data, probability_loss(function)).result()


def train(
    cli: CLIConfig, client: TrainingClient, table: list[Cell], logger: Logger, steps: range
) -> None:
    """Trains, and compares with the table as it goes."""
    renderer = DecisionRenderer(get_renderer(cli.renderer, get_tokenizer(cli.model_name)))
    rate = cli.rate
    metrics, learned = _measure(client, renderer, table)
    if steps.start == 0:
        logger.log_metrics(metrics, step=0)
    for step in steps:
        began = time.monotonic()
        # Linear to 0: at a constant rate the noise of the outcomes would stay in the weights.
        left = 1 - step / cli.max_steps
        result = train_on(client, renderer, make_batch(cli, table, step), cli.loss)
        client.optim_step(tinker.AdamParams(learning_rate=rate * left)).result()
        row = {f"train/{name}": value for name, value in result.metrics.items()}
        row |= {"learning_rate": rate * left, "time/total": time.monotonic() - began}
        if step + 1 == cli.max_steps or (cli.eval_every and (step + 1) % cli.eval_every == 0):
            metrics, learned = _measure(client, renderer, table)
            row |= metrics
        logger.log_metrics(row, step=step + 1)
        save_step(client, cli, step + 1, cli.max_steps)
    show(table, learned, metrics)


def _measure(
    client: TrainingClient, renderer: DecisionRenderer, table: list[Cell]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    sampler = client.save_weights_and_get_sampling_client().result()
    return asyncio.run(compare(sampler, renderer, table))


def show(table: list[Cell], learned: list[dict[str, float]], metrics: dict[str, float]) -> None:
    """Prints learned and true probabilities of each cell."""
    console = get_console()
    header = "".join(f"{name:>15}" for name in CHOICES)
    console.print(f"{'learned (true)':32}{header}", soft_wrap=True)
    for cell, found in zip(table, learned, strict=True):
        question = cell.decision.text.removeprefix("How does Tom go? ")
        values = "".join(f"{found[n]:9.2f} ({cell.probabilities[n]:.2f})" for n in CHOICES)
        console.print(f"{question:32}{values}", highlight=False, soft_wrap=True)
    console.print(
        f"largest error {metrics['test/max_error']:.3f}, mean {metrics['test/mean_error']:.3f}; "
        f"Brier score {metrics['test/brier']:.4f}, {metrics['test/brier_bound']:.4f} with the "
        "true probabilities",
        highlight=False,
        soft_wrap=True,
    )


def main(cli: CLIConfig) -> None:
    """Trains a model on a table of probabilities."""
    if cli.loss not in ("brier", "cross_entropy"):
        raise ConfigurationError(f"loss: got {cli.loss!r}, expected brier or cross_entropy")
    check_model(cli)
    need = Need("loss:cross_entropy", "loss=cross_entropy")
    if cli.loss == "brier" or cli.soft:
        setting = f"loss={cli.loss} soft={cli.soft}"
        need = Need("custom_loss", setting, "set loss=cross_entropy soft=False")
    run_own_loop(cli, lambda _: make_table(cli.seed), lambda *_: cli.max_steps, train, [need])


if __name__ == "__main__":
    run_entrypoint(main)
