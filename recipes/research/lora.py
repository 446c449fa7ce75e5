"""Does LoRA learn as well as full fine-tuning, at which learning rate, and on which layers?

    python -m recipes.research.lora
    python -m recipes.research.lora learning_rates=1e-3,4e-3 seeds=0 log_path=…

A small model learns a new operation on strings of digits, by supervised learning and by RL with the
number of right digits as the reward. The arms are full fine-tuning (``lora_rank=0``), adapters of
rank 32 and 1 on all layers, each at several rates; supervised also of rank 32 on attention or MLP
alone. The control, of rank 32, has answers to other strings, or random rewards.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import chz
import tinker

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import ServiceClient, TrainingClient
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.learning_rate import learn
from tinker_cookbook.recipes.research.strings_model import LENGTH, Rotations, strings_model
from tinker_cookbook.recipes.rl_loop import make_datum
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

CONTROL = "control"
KINDS: dict[str, dict[str, Any]] = {
    "full": {"rank": 0},
    "LoRA 32": {"rank": 32},
    "LoRA 1": {"rank": 1},
    "attention": {"rank": 32, "train_mlp": False, "train_unembed": False},
    "MLP": {"rank": 32, "train_attn": False, "train_unembed": False},
    CONTROL: {"rank": 32},
}
"""What is trained: arguments of ``create_lora_training_client``."""
IN_RL = ("full", "LoRA 32", "LoRA 1", CONTROL)
GROUPS = 8
"""Prompts of an RL step."""
GROUP_SIZE = 8
"""Answers to each prompt."""


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/lora")
    learning_rates: list[float] = study.several([3e-4, 1e-3, 3e-3, 1e-2], "Constant learning rates")
    batch_size: int = number(32, "Examples of a supervised step", low=1)
    sl_steps: int = number(40, "Supervised steps", low=1)
    rl_steps: int = number(20, "RL steps", low=1)


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(sl_steps=4, rl_steps=1, learning_rates=[1e-3])
    model = strings_model(quick=config.quick)
    with connect("local", dtype="float32") as connection:
        run = partial(_run, config, connection.service, model)
        arms = {
            f"{method}, {kind}, rate {rate:g}": partial(run, method, kind, rate)
            for kind in KINDS
            for method in (METHODS if kind in IN_RL else ("SL",))
            for rate in config.learning_rates
        }
        columns = {"nll": "held-out nats", "right": "held-out digits right"}
        study.run_study(config, arms, columns, partial(draw, config))


def _run(
    config: Config,
    service: ServiceClient,
    model: str,
    method: str,
    kind: str,
    rate: float,
    seed: int,
) -> study.Row:
    client = service.create_lora_training_client(model, seed=seed, **KINDS[kind]).result()
    task = Rotations(model)
    row = METHODS[method](config, client, task, rate, seed, kind == CONTROL)
    problems = list(task.test_problems(50))
    # All at once, so that the engine samples one batch.
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=LENGTH, temperature=0.0)
    prompts = [tinker.ModelInput.from_ints(prompt) for prompt, _ in problems]
    answers = [sampler.sample(prompt, 1, params) for prompt in prompts]
    rewards = [
        _right(list(future.result().sequences[0].tokens), answer)
        for future, (_, answer) in zip(answers, problems, strict=True)
    ]
    return {**row, "right": sum(rewards) / len(rewards)}


def _imitate(
    config: Config, client: TrainingClient, task: Rotations, rate: float, seed: int, control: bool
) -> study.Row:
    """Trains on right answers, or as a control on those to other strings."""
    row = learn(client, task, config.batch_size, rate, config.sl_steps, seed, control)
    return {"nll": row["nll"]}


def _reinforce(
    config: Config, client: TrainingClient, task: Rotations, rate: float, seed: int, control: bool
) -> study.Row:
    """Trains on sampled answers; the advantage is the reward minus the mean of the group. A control
    has random rewards."""
    adam, curve, rng = tinker.AdamParams(learning_rate=rate), list[float](), random.Random(seed)
    for step in range(config.rl_steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        requests = []
        for place, (prompt, answer) in enumerate(task.problems(1000 * seed + step, GROUPS)):
            number = GROUPS * (1000 * seed + step) + place
            params = tinker.SamplingParams(max_tokens=LENGTH, seed=number)
            whole = tinker.ModelInput.from_ints(prompt)
            requests.append((whole, answer, sampler.sample(whole, GROUP_SIZE, params)))
        data, rewards = [], list[float]()
        for whole, answer, future in requests:
            samples = future.result().sequences
            group = [_right(list(one.tokens), answer) for one in samples]
            rewards += group
            if control:
                group = [rng.random() for _ in group]
            mean = sum(group) / len(group)
            data += [
                make_datum(whole, list(one.tokens), list(one.logprobs or ()), reward - mean)
                for one, reward in zip(samples, group, strict=True)
                if reward != mean
            ]
        curve.append(sum(rewards) / len(rewards))
        if data:
            client.forward_backward(data, "importance_sampling")
            client.optim_step(adam).result()
    loss = client.forward(task.test(), "cross_entropy").result()
    return {"nll": loss.metrics["loss:sum"] / len(task.test()) / LENGTH, "reward": curve}


def _right(tokens: list[int], answer: list[int]) -> float:
    """Returns the share of right digits."""
    return sum(a == b for a, b in zip(tokens, answer, strict=False)) / len(answer)


METHODS: dict[str, Callable[[Config, TrainingClient, Rotations, float, int, bool], study.Row]] = {
    "SL": _imitate,
    "RL": _reinforce,
}


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws the result over the learning rate, for SL and RL."""
    panels = zip(figure.subplots(1, 2), (("SL", "nll"), ("RL", "right")), strict=True)
    for axes, (method, key) in panels:
        for kind, colour in zip(KINDS, study.COLOURS, strict=False):
            points: list[tuple[float, float, float, float]] = []
            for rate in config.learning_rates:
                rows = of_arm.get(f"{method}, {kind}, rate {rate:g}", [])
                if values := [row[key] for row in rows]:
                    points.append((rate, sum(values) / len(values), min(values), max(values)))
            if points:
                rates, means, lows, highs = zip(*points, strict=True)
                style = "--" if kind == CONTROL else "-"
                axes.plot(rates, means, marker="o", color=colour, linestyle=style, label=kind)
                axes.fill_between(rates, lows, highs, color=colour, alpha=0.12, linewidth=0)
        axes.set_xscale("log")
        if method == "SL":
            axes.set_yscale("log")
        label = "held-out nats per token" if method == "SL" else "share of right digits"
        study.finish_axes(axes, method, "learning rate", label)


if __name__ == "__main__":
    run_entrypoint(main)
