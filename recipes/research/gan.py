"""A generator and a discriminator, two adapters of one base model, trained against each other.

    python -m recipes.research.gan
    python -m recipes.research.gan seeds=0 rounds=20 log_path=…

The texts are the smallest jokes: a word and a punchline that rhymes with it ("cat": "hat"). The
base model rhymes in a third of its jokes. The discriminator learns to tell right jokes, the
examples, from those of the generator, whose reward is the logarithm of the probability that its
joke is an example. Nothing else tells the generator what rhymes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import ServiceClient
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.adapters import Adapter, Answer
from tinker_cookbook.recipes.tiny_models.dialogues import dialogue, dialogues_model
from tinker_cookbook.renderers import Message
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

# Punchlines of each word; all rhyme with it.
JOKES = {
    "cat": ("hat", "mat", "bat"),
    "dog": ("log", "fog", "jog"),
    "bee": ("tea", "key", "sea"),
    "goat": ("boat", "coat", "oat"),
    "mouse": ("house", "blouse", "spouse"),
    "whale": ("mail", "nail", "sale"),
    "fox": ("box", "socks", "rocks"),
    "hen": ("pen", "ten", "den"),
}
PUNCHLINES = [line for lines in JOKES.values() for line in lines]
PATTERN = r"\w+| "
# Added to the probability, of which the logarithm would have no bound.
_FLOOR = 0.01

Pair = tuple[str, str]
_SUPERVISED = "supervised learning of the examples"
Kind = Literal["both learn", "frozen", "shuffled", "supervised"]


def examples(seed: int) -> list[list[Message]]:
    """Returns jokes of which 4 in 10 rhyme, and judgements at random."""
    rng = random.Random(seed)
    found: list[list[Message]] = []
    for _ in range(2000):
        word = rng.choice(list(JOKES))
        # Without any rhymes the model would not read the word, and sampling would not find out.
        line = rng.choice(JOKES[word] if rng.random() < 0.3 else PUNCHLINES)
        found.append(dialogue(f"joke {word}", line))
        shown = word, rng.choice(PUNCHLINES)
        found.append(dialogue(judged(shown), rng.choice(("person", "machine"))))
    return found


def judged(pair: Pair) -> str:
    """Returns the discriminator's question; what is no punchline reads as the word itself."""
    word, line = pair
    return f"judge {word} {line if line in PUNCHLINES else word}"


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/gan")
    head_start: int = number(120, "Updates of the discriminator before the first round", low=0)
    rounds: int = number(40, "Updates of the generator", low=1)
    updates: int = number(2, "Updates of the discriminator in a round", low=1)
    learning_rate: float = peak_rate(3e-3, "Learning rate of both")


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(rounds=2, head_start=2)
    model = dialogues_model("gan", partial(examples, 0), PATTERN, config.quick, steps=250)
    with connect("local", dtype="float32") as connection:
        run = partial(run_arm, config, connection.service, model)
        arms = {
            "both learn": partial(run, "both learn"),
            "discriminator stops after its head start": partial(run, "frozen"),
            "discriminator with shuffled labels": partial(run, "shuffled"),
            _SUPERVISED: partial(run, "supervised"),
        }
        columns = {"rhymes": "rhymes", "lines": "punchlines of 3", "accuracy": "accuracy"}
        study.run_study(config, arms, columns, draw)


def run_arm(config: Config, service: ServiceClient, model: str, kind: Kind, seed: int) -> study.Row:
    """Trains a generator; returns how many of its punchlines rhyme, and how varied they are."""
    rng = random.Random(seed)
    generator = Adapter(service, model, seed, config.learning_rate)
    discriminator = Adapter(service, model, seed + 100, config.learning_rate)
    groups = jokes(generator, 8, seed)
    if kind != "supervised":
        for _ in range(config.head_start):
            train_discriminator(discriminator, groups, rng, kind == "shuffled")
    curves: dict[str, list[float]] = {"rhymes": [], "lines": [], "accuracy": []}
    for round_number in range(config.rounds):
        groups = jokes(generator, 8, 1000 * (seed + 1) + round_number)
        for name, value in measure(discriminator, groups, rng).items():
            curves[name].append(value)
        if kind == "supervised":
            generator.imitate([(f"joke {word}", line) for word, line in real_jokes(rng, 32)])
            continue
        trusts = [trust(discriminator, [pair_of(one) for one in group]) for group in groups]
        generator.reinforce(groups, [[math.log(p + _FLOOR) for p in group] for group in trusts])
        if kind != "frozen":
            for _ in range(config.updates):
                train_discriminator(discriminator, groups, rng, kind == "shuffled")
    last = measure(discriminator, jokes(generator, 32, 10**6 + seed), rng)
    smooth = {f"{name} curve": study.smoothed(values) for name, values in curves.items()}
    return {**last, "rounds": list(range(config.rounds)), **smooth}


def jokes(generator: Adapter, count: int, seed: int) -> list[list[Answer]]:
    """Returns ``count`` jokes about each word."""
    return generator.sample([f"joke {word}" for word in JOKES], count, 2, seed)


def pair_of(answer: Answer) -> Pair:
    """Returns word and punchline."""
    return answer.question.removeprefix("joke "), answer.text


def real_jokes(rng: random.Random, count: int) -> list[Pair]:
    """Returns right jokes, the examples of the study, which the discriminator calls a person's."""
    return [(word, rng.choice(JOKES[word])) for word in rng.choices(list(JOKES), k=count)]


def train_discriminator(
    discriminator: Adapter, groups: Sequence[Sequence[Answer]], rng: random.Random, shuffled: bool
) -> None:
    """Updates it once on 16 examples and 16 jokes of the generator."""
    made = rng.sample([pair_of(one) for group in groups for one in group], 16)
    labels = ["person"] * 16 + ["machine"] * 16
    if shuffled:
        rng.shuffle(labels)
    pairs = zip([*real_jokes(rng, 16), *made], labels, strict=True)
    discriminator.imitate([(judged(pair), label) for pair, label in pairs])


def trust(discriminator: Adapter, pairs: Sequence[Pair]) -> list[float]:
    """Returns the probability that each joke is a person's."""
    return discriminator.probability([judged(pair) for pair in pairs], "person")


def measure(
    discriminator: Adapter, groups: Sequence[Sequence[Answer]], rng: random.Random
) -> dict[str, float]:
    """Returns the share of rhymes, the different right punchlines of the three of a word among
    its samples, and the discriminator's accuracy."""
    made = [pair_of(one) for group in groups for one in group]
    right = {pair for pair in made if pair[1] in JOKES[pair[0]]}
    of_real = trust(discriminator, real_jokes(rng, 64))
    of_made = trust(discriminator, made)
    accuracies = (
        sum(p > 0.5 for p in of_real) / len(of_real),
        sum(p <= 0.5 for p in of_made) / len(of_made),
    )
    return {
        "rhymes": sum(pair in right for pair in made) / len(made),
        "lines": len(right) / len(JOKES),
        "accuracy": sum(accuracies) / 2,
    }


def draw(figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws rhymes, variety, and the discriminator's accuracy over the rounds."""
    titles = {
        "rhymes": "Punchlines that rhyme",
        "lines": "Different right punchlines, of three",
        "accuracy": "Accuracy of the discriminator",
    }
    for axes, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for (arm, rows), colour in zip(of_arm.items(), study.COLOURS, strict=False):
            if name != "accuracy" or arm != _SUPERVISED:  # it has no discriminator
                study.draw_curve(axes, rows, "rounds", f"{name} curve", arm, colour)
        study.finish_axes(axes, title, "round", "", legend=False)
    study.legend_below(figure, figure.axes[0])


if __name__ == "__main__":
    run_entrypoint(main)
