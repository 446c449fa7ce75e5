"""Does a model learn from its own majority answers to problems without a label?

    python -m recipes.research.noisy_student
    python -m recipes.research.noisy_student seeds=0 steps=20 log_path=…

The loss is ``L_labelled + weight * L_pseudo``: half of the groups are sums with a known answer; in
the others the most frequent answer of the group counts as right, with ``weight``. All arms sample
the same number of answers. The model that the study starts from (made in half a minute) answers
``a + b`` right most often if there is no carry, and forgets the carry most often if there is one:
so its majority is right on the first kind and wrong on the second.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.runs import reinforce
from tinker_cookbook.recipes.tiny_models.dialogues import dialogue, dialogues_model
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.envs.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.task import TaskDatasetBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

KINDS = ("no carry", "carry")


class Sum(NamedTuple):
    """A sum of two digits; the answer of one that is not labelled is used for evaluation only."""

    x: int
    y: int
    labelled: bool = True

    @property
    def carry(self) -> bool:
        """Whether the result has two digits."""
        return self.x + self.y > 9


class SumEnv(ProblemEnv):
    """Write the sum. An answer to a sum without a label has reward 0 here (see the group)."""

    def __init__(self, problem: Sum, renderer: Renderer) -> None:
        super().__init__(renderer)
        self.problem, self.answer = problem, ""

    def get_question(self) -> str:
        """Returns the sum."""
        return f"{self.problem.x} + {self.problem.y}"

    def check_answer(self, sample_str: str) -> bool:
        """Keeps the answer; returns whether it is known to be right."""
        self.answer = sample_str
        return self.problem.labelled and sample_str == self.get_reference_answer()

    def get_reference_answer(self) -> str:
        """Returns the right answer."""
        return str(self.problem.x + self.problem.y)


@dataclass(frozen=True)
class SelfLabelledGroup(ProblemGroupBuilder):
    """Answers to one sum; without a label, its most frequent answer has the reward ``weight``.

    Without ``majority``, a control, the first answer is the label.
    """

    weight: float = 1.0
    majority: bool = True

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Returns the rewards by the group's own label, and ``label_right``."""
        envs = [env for env in env_group if isinstance(env, SumEnv)]
        if envs[0].problem.labelled:
            return await super().compute_group_rewards(trajectory_group, env_group)
        answers = [env.answer for env in envs]
        label = Counter(answers).most_common(1)[0][0] if self.majority else answers[0]
        right: Metrics = {"label_right": float(label == envs[0].get_reference_answer())}
        # An advantage is a reward minus the group's mean, so this is the weight of the loss.
        return [(self.weight * (answer == label), right) for answer in answers]


@chz.chz
class SumsBuilder(TaskDatasetBuilder):
    """Sums, of which some have a label."""

    weight: float = chz.field(default=1.0, doc="Weight of the loss of the model's own labels")
    majority: bool = chz.field(default=True, doc="Whether a label is the most frequent answer")

    def group(self, renderer: Renderer, size: int, problem: Sum) -> EnvGroupBuilder:
        """Returns the answers to one sum."""
        thunk, tag = self.env_thunk(problem, renderer), KINDS[problem.carry]
        return SelfLabelledGroup(thunk, size, tag, self.weight, self.majority)


def example_answers(seed: int) -> list[list[Message]]:
    """Returns answers to all sums: 80 % are right, but only 35 % where there is a carry.

    There 45 % lack the ten. The others are one more or one less.
    """
    rng = random.Random(seed)
    examples: list[list[Message]] = []
    for _ in range(4000):
        x, y = rng.randrange(10), rng.randrange(10)
        errors = (0, -10) if x + y > 9 else (0, 0)
        error = rng.choices((*errors, 1, -1), (0.35, 0.45, 0.1, 0.1))[0]
        examples.append(dialogue(f"{x} + {y}", str(max(x + y + error, 0))))
    return examples


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/noisy_student")
    num_labelled: int = number(16, "Sums with a label", low=2)
    weights: list[float] = study.several([0.3, 1.0], "Weights of the pseudo-labelled loss")
    steps: int = number(30, "Steps of 16 groups of 8 answers", low=1)
    learning_rate: float = peak_rate(3e-3, "Learning rate")


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(steps=2)
    model = dialogues_model("sums", partial(example_answers, 0), r"\d+| \+ ", config.quick)
    run = partial(run_arm, config, model)
    arms = {"labels only": partial(run, "labels")}
    for weight in config.weights:
        arms[f"labels and majority, weight {weight:g}"] = partial(run, "both", weight=weight)
    arms["majority only"] = partial(run, "pseudo")
    arms["labels and one own answer"] = partial(run, "both", majority=False)
    arms["all have labels"] = partial(run, "all")
    columns = {"before": "before", "held_out": "after", "no carry": "no carry", "carry": "carry"}
    study.run_study(config, arms, columns, partial(draw, config))


def problems_of(config: Config, seed: int) -> tuple[list[Sum], list[Sum], list[Sum]]:
    """Returns sums with a label, sums without, and held-out ones (a third of the rest)."""
    pairs = [(x, y) for x in range(10) for y in range(10)]
    random.Random(seed).shuffle(pairs)
    sums = [Sum(*pair) for pair in pairs]
    labelled, others = sums[: config.num_labelled], sums[config.num_labelled :]
    held_out = others[: len(others) // 3]
    return labelled, [one._replace(labelled=False) for one in others[len(held_out) :]], held_out


def run_arm(
    config: Config, model: str, kind: str, seed: int, weight: float = 1.0, majority: bool = True
) -> study.Row:
    """Trains with the sums of one arm; returns the accuracy on held-out sums and its curve."""
    labelled, unlabelled, held_out = problems_of(config, seed)
    repeated = labelled * (len(unlabelled) // len(labelled))  # as many as without a label
    sets = {
        "labels": repeated,
        "both": repeated + unlabelled,
        "pseudo": unlabelled,
        "all": [one._replace(labelled=True) for one in labelled + unlabelled],
    }
    folder = Path(config.log_path) / f"{kind}-{weight:g}-{majority}-{seed}"
    rows = reinforce(
        folder,
        model,
        seed,
        SumEnv,
        sets[kind],
        held_out,
        SumsBuilder,
        {"weight": weight, "majority": majority, "batch_size": 16},
        learning_rate=config.learning_rate,
        max_tokens=3,
        max_steps=config.steps,
        eval_every=5,
    )
    return {
        "before": rows[0]["test/env/all/correct"],
        "held_out": rows[-1]["test/env/all/correct"],
        **{kind: rows[-1][f"test/env/{kind}/correct"] for kind in KINDS},
        "steps": [row["step"] for row in rows],
        **{f"curve {kind}": [row[f"test/env/{kind}/correct"] for row in rows] for kind in KINDS},
    }


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws the accuracy on held-out sums, without and with a carry."""
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        for (name, rows), colour in zip(of_arm.items(), study.COLOURS, strict=False):
            study.draw_curve(axes, rows, "steps", f"curve {kind}", name, colour)
        title = f"Held-out sums, {kind}"
        study.finish_axes(axes, title, "step", "right answers", legend=kind == "carry")


if __name__ == "__main__":
    run_entrypoint(main)
