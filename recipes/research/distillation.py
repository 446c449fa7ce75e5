"""Is on-policy distillation cheaper than training on the teacher's texts, at equal compute?

    python -m recipes.research.distillation
    python -m recipes.research.distillation learning_rates=3e-3 seeds=0 log_path=…

A tiny model that lists words, trained by RL to list good ones, is the teacher of the untrained
model. On-policy, the student writes, and the teacher scores each token. Off-policy, the student
imitates texts of the teacher: new ones at each step, or the same ones, which cost nothing after the
first step. The control has the teacher's scores in random order. Compute is CPU time, of sampling
and of the teacher's scores too.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import ServiceClient
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.adapters import Adapter, Answer
from tinker_cookbook.recipes.research.words_model import MAX_TOKENS, SAFE, points, words_model
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

Kind = Literal["on-policy", "new texts", "same texts", "control"]
KINDS: dict[str, Kind] = {
    "on-policy": "on-policy",
    "off-policy, new texts": "new texts",
    "off-policy, the same texts": "same texts",
    "on-policy, scores in random order (control)": "control",
}
_ANSWERS = 16
"""Answers to each of the four questions, at each step."""
_EVERY = 2
"""Updates between two measurements."""


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/distillation")
    learning_rates: list[float] = study.several([1e-3, 3e-3, 1e-2], "Constant learning rates")
    teacher_steps: int = number(60, "RL steps of the teacher", low=1)
    steps: int = number(60, "Updates of a student", low=1)


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(teacher_steps=2, steps=2)
    model = words_model(quick=config.quick)
    with connect("local", dtype="float32") as connection:
        # Not before an arm needs it.
        teacher = cache(partial(make_teacher, config, connection.service, model))
        run = partial(run_arm, config, connection.service, model, teacher)
        arms = {
            f"{name}, rate {rate:g}": partial(run, kind, rate)
            for name, kind in KINDS.items()
            for rate in config.learning_rates
        }
        columns = {
            "to 1 nat": "seconds to 1 nat",
            "kl": "KL at the end",
            "points": "points",
            "cost": "seconds of all updates",
        }
        study.run_study(config, arms, columns, partial(draw, config))


def make_teacher(config: Config, service: ServiceClient, model: str) -> Adapter:
    """Returns the model after RL with the points of its answers as rewards."""
    teacher = Adapter(service, model, 0, 3e-3)
    for step in range(config.teacher_steps):
        groups = teacher.sample(list(SAFE), _ANSWERS, MAX_TOKENS, step)
        teacher.reinforce(groups, [[points(a.question, a.text) for a in g] for g in groups])
    return teacher


def run_arm(
    config: Config,
    service: ServiceClient,
    model: str,
    made_teacher: Callable[[], Adapter],
    kind: Kind,
    rate: float,
    seed: int,
) -> study.Row:
    """Trains a student; returns its KL from the teacher over CPU seconds, and its points."""
    student, teacher = Adapter(service, model, seed, rate), made_teacher()
    rng = random.Random(seed)
    spent, texts = 0.0, list[Answer]()
    measured = [(0.0, measure(student, teacher, seed))]
    for step in range(1, config.steps + 1):
        started = time.process_time()
        number = 1000 * (seed + 1) + step
        if kind in ("on-policy", "control"):
            answers = draw_answers(student, number)
            scores = advantages(answers, teacher)
            if kind == "control":
                flat = [value for values in scores for value in values]
                rng.shuffle(flat)
                left = iter(flat)
                scores = [[next(left) for _ in values] for values in scores]
            student.follow(answers, scores)
        else:
            if kind == "new texts" or not texts:
                texts = draw_answers(teacher, number)
            student.imitate([(one.question, one.text) for one in texts])
        spent += time.process_time() - started
        if step % _EVERY == 0 or step == config.steps:
            measured.append((spent, measure(student, teacher, seed)))
    kls = [kl for _, (kl, _) in measured]
    return {
        "to 1 nat": next((spent for spent, (kl, _) in measured if kl < 1), math.inf),
        "kl": kls[-1],
        "points": measured[-1][1][1],
        "cost": spent,
        "spent": [spent for spent, _ in measured],
        "curve": kls,
    }


def draw_answers(adapter: Adapter, seed: int) -> list[Answer]:
    """Returns the answers of a step."""
    groups = adapter.sample(list(SAFE), _ANSWERS, MAX_TOKENS, seed)
    return [one for group in groups for one in group]


def advantages(answers: Sequence[Answer], teacher: Adapter) -> list[list[float]]:
    """Returns how much more probable each token is for the teacher than for the student, in
    nats."""
    pairs = zip(teacher.logprobs(answers), answers, strict=True)
    return [[a - b for a, b in zip(t, one.logprobs, strict=True)] for t, one in pairs]


def measure(student: Adapter, teacher: Adapter, seed: int) -> tuple[float, float]:
    """Returns the KL of a student's answer from the teacher, in nats, and the mean points."""
    # The same seeds at each measurement, which no step uses.
    answers = [one for n in range(2) for one in draw_answers(student, 1_000_000 + 10 * seed + n)]
    kl = -sum(map(sum, advantages(answers, teacher))) / len(answers)
    return kl, sum(points(one.question, one.text) for one in answers) / len(answers)


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws the KL over CPU seconds, one panel for each learning rate."""
    panels = figure.subplots(1, len(config.learning_rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, config.learning_rates, strict=True):
        for name, colour in zip(KINDS, study.COLOURS, strict=False):
            if rows := of_arm.get(f"{name}, rate {rate:g}"):
                study.draw_curve(axes, rows, "spent", "curve", name, colour)
        axes.set_yscale("log")
        title = f"learning rate {rate:g}"
        study.finish_axes(axes, title, "CPU seconds", "KL, nats of an answer", legend=False)
    study.legend_below(figure, panels[0])


if __name__ == "__main__":
    run_entrypoint(main)
