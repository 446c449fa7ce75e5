"""How does the best learning rate depend on the batch size and the size of the model?

    python -m recipes.research.learning_rate
    python -m recipes.research.learning_rate widths=64 batch_sizes=8,128 seeds=0 log_path=…

Supervised learning of a new operation on strings of digits, by models of three widths, at several
batch sizes and learning rates. The rules of thumb: the rate grows with the square root of the batch
size and falls with the width (``get_lr``), a batch of 128 and at least 100 steps. The control is
trained on answers to other strings, so it can learn no more than that an answer has digits.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import chz
import tinker

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import ServiceClient, TrainingClient
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.hyperparam_utils import get_lr
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.strings_model import LENGTH, Rotations, strings_model
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import print_line


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/learning_rate")
    widths: list[int] = study.several([32, 64, 128], "Widths of the models")
    batch_sizes: list[int] = study.several([8, 32, 128], "Examples of a step")
    learning_rates: list[float] = study.several(
        [1e-3, 2e-3, 4e-3, 8e-3, 16e-3], "Constant learning rates"
    )
    steps: int = number(40, "Steps", low=1)
    lora_rank: int = number(32, "Rank of the LoRA adapter", low=1)


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(widths=config.widths[:1], steps=4)
    models = {width: strings_model(width, quick=config.quick) for width in config.widths}
    with connect("local", dtype="float32") as connection:
        run, arms = partial(_train, config, connection.service), {}
        for width, model in models.items():
            for batch_size in config.batch_sizes:
                for rate in config.learning_rates:
                    arms[_name(width, batch_size, rate)] = partial(run, model, batch_size, rate)
            # At a rate that is good for all arms.
            middle = config.learning_rates[len(config.learning_rates) // 2]
            arms[f"width {width}, control"] = partial(
                run, model, config.batch_sizes[-1], middle, control=True
            )
        columns = {"nll_quarter": "nll, 1/4", "nll_half": "nll, 1/2", "nll": "nll, end"}
        rows = study.run_study(config, arms, columns, partial(draw, config))
    for width, model in models.items():
        found = [f"batch {b}: {best_rate(config, rows, width, b):.2g}" for b in config.batch_sizes]
        print_line(f"width {width}: get_lr {get_lr(model):.2g}; best rate {', '.join(found)}")


def _name(width: int, batch_size: int, rate: float) -> str:
    return f"width {width}, batch {batch_size}, rate {rate:g}"


def _train(
    config: Config,
    service: ServiceClient,
    model: str,
    batch_size: int,
    rate: float,
    seed: int,
    control: bool = False,
) -> study.Row:
    client = service.create_lora_training_client(model, rank=config.lora_rank, seed=seed).result()
    return learn(client, Rotations(model), batch_size, rate, config.steps, seed, control)


def learn(
    client: TrainingClient,
    task: Rotations,
    batch_size: int,
    rate: float,
    steps: int,
    seed: int,
    control: bool,
) -> study.Row:
    """Trains on fresh examples, as a ``control`` with answers to others; returns held-out nats per
    token after a quarter of the steps, half and all of them."""
    measured = {steps // 4: "nll_quarter", steps // 2: "nll_half", steps: "nll"}
    row: study.Row = {}
    adam = tinker.AdamParams(learning_rate=rate)
    test = task.test()
    for step in range(1, steps + 1):
        batch = task.batch(seed * steps + step, batch_size, others_answers=control)
        client.forward_backward(batch, "cross_entropy")
        stepped = client.optim_step(adam)
        if step in measured:
            stepped.result()
            loss = client.forward(test, "cross_entropy").result().metrics["loss:sum"]
            row[measured[step]] = loss / (len(test) * LENGTH)
    return row


def best_rate(config: Config, rows: list[study.Row], width: int, batch_size: int) -> float:
    """Returns the rate with the lowest final loss: the minimum of a parabola through the best
    tried rate and its neighbours, on the scale of log rate."""
    means = [_mean(config, rows, width, batch_size, rate) for rate in config.learning_rates]
    at = min(range(len(means)), key=means.__getitem__)
    if 0 < at < len(means) - 1:
        low, middle, high = (math.log(one) for one in means[at - 1 : at + 2])
        shift = 0.5 * (low - high) / (low - 2 * middle + high)
        factor = config.learning_rates[at + 1] / config.learning_rates[at]
        return config.learning_rates[at] * factor**shift
    return config.learning_rates[at]


def _mean(config: Config, rows: list[study.Row], width: int, batch_size: int, rate: float) -> float:
    name = _name(width, batch_size, rate)
    values = [row["nll"] for row in rows if row["arm"] == name]
    return sum(values) / len(values) if values else math.inf


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws the loss over the rate for each width, and the best rate over the batch size."""
    rows = [row for found in of_arm.values() for row in found]
    *panels, last = figure.subplots(1, len(config.widths) + 1)
    for axes, width in zip(panels, config.widths, strict=True):
        for batch_size, colour in zip(config.batch_sizes, study.COLOURS, strict=False):
            means = [_mean(config, rows, width, batch_size, r) for r in config.learning_rates]
            label = f"batch {batch_size}"
            axes.plot(config.learning_rates, means, marker="o", color=colour, label=label)
        if control := [row["nll"] for row in of_arm.get(f"width {width}, control", [])]:
            mean = sum(control) / len(control)
            axes.axhline(mean, color="black", linestyle="--", label="control")
        axes.set(xscale="log", yscale="log")
        label = "held-out nats per token" if axes is panels[0] else ""
        study.finish_axes(axes, f"width {width}", "learning rate", label, legend=False)
    study.legend_below(figure, panels[0], 4)
    best = list[float]()
    for width, colour in zip(config.widths, study.COLOURS[3:], strict=False):
        best = [best_rate(config, rows, width, b) for b in config.batch_sizes]
        last.plot(config.batch_sizes, best, marker="o", color=colour, label=f"width {width}")
    first = config.batch_sizes[0]
    rule = [best[0] * math.sqrt(b / first) for b in config.batch_sizes]
    last.plot(config.batch_sizes, rule, color="black", linestyle=":", label="square root")
    last.set(xscale="log", yscale="log")
    study.finish_axes(last, "best rate", "batch size", "learning rate")


if __name__ == "__main__":
    run_entrypoint(main)
