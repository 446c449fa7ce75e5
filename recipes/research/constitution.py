"""Does RL from a model's own judgement work better from a base or from an instruction model?

    python -m recipes.research.constitution
    python -m recipes.research.constitution seeds=0 rl_steps=5 log_path=…

The stages of Constitutional AI (Bai et al. 2022, arXiv 2212.08073) with an exact rule for lists of
words: no dangerous word, no word of another kind, no repetition. The model answers, names a fault
of its answer and revises it. It is trained on its revised answers (SL), and then by RL with itself
as the judge of pairs of answers. The base model has seen answers of all sorts. The instruction
model is the base model after training on answers that keep to the question, but name a dangerous
thing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import chz
import tinker

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.judge import (
    Answers,
    RandomPreference,
    agreement,
    prompted_judge,
    reinforce_by,
    sample,
)
from tinker_cookbook.recipes.research.runs import imitate
from tinker_cookbook.recipes.research.words_model import (
    CRITICISE,
    DANGEROUS,
    FINE,
    MAX_TOKENS,
    REVISE,
    SAFE,
    faults,
    points,
    text_of,
    words_model,
    words_of,
)
from tinker_cookbook.recipes.tiny_models.dialogues import RENDERER, dialogue
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

STAGES = ("before", "SL", "SL, RL")
_MEASURED = ("safe", "points", "on topic", "different")


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/constitution")
    instruct_steps: int = number(100, "Steps of 32 answers that make the instruction model", low=1)
    instruct_learning_rate: float = peak_rate(3e-3, "Learning rate of these steps")
    revisions: int = number(2, "Rounds of critique and revision", low=1)
    sl_steps: int = number(60, "Steps of 32 revised answers", low=1)
    sl_learning_rate: float = peak_rate(1e-3, "Learning rate of SL")
    rl_steps: int = number(20, "RL steps of 4 questions with 8 answers each", low=1)
    rl_learning_rate: float = peak_rate(1e-3, "Learning rate of RL")
    answers: int = number(80, "Answers to each question to revise, and in an evaluation", low=2)


class Start(NamedTuple):
    """A model to start from: its weights to train and to sample from; None is the base model."""

    state: str | None = None
    sampler: str | None = None


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(instruct_steps=2, sl_steps=2, rl_steps=2, answers=12)
    model = words_model(quick=config.quick)
    run = partial(run_arm, config, model)
    arms = {
        "instruct": partial(run, "instruct"),
        "base": partial(run, "base"),
        "instruct, random critique and judge": partial(run, "instruct", informed=False),
        "base, random critique and judge": partial(run, "base", informed=False),
    }
    columns = {f"{key} {stage}": f"{key}, {stage}" for key in _MEASURED[:2] for stage in STAGES}
    study.run_study(config, arms, columns, partial(draw, config))


def instruct_answer(rng: random.Random, kind: str) -> str:
    """Returns four to six different words of the kind, one or two of them dangerous."""
    bad = rng.sample(DANGEROUS[kind], rng.randint(1, 2))
    words = bad + rng.sample(SAFE[kind], rng.randint(3, 4))
    return text_of(rng.sample(words, len(words)))


async def replies(
    client: SamplingClient, model: str, conversations: Sequence[list[Message]], seed: int
) -> list[str]:
    """Returns an answer to each conversation."""
    renderer = get_renderer(RENDERER, get_tokenizer(model))
    stop = renderer.get_stop_sequences()

    async def reply(number: int, conversation: list[Message]) -> str:
        params = tinker.SamplingParams(
            max_tokens=MAX_TOKENS, stop=stop, seed=100_000 * seed + number
        )
        prompt = renderer.build_generation_prompt(conversation)
        response = await client.sample(prompt, 1, params)
        message, _ = renderer.parse_response(list(response.sequences[0].tokens))
        return get_text_content(message)

    return await asyncio.gather(*(reply(*one) for one in enumerate(conversations)))


async def revised_answers(
    config: Config, client: SamplingClient, model: str, seed: int, informed: bool
) -> tuple[Answers, float]:
    """Returns answers after critique and revision, and how often the first critique was right.

    Right is a critique that names a fault, or finds none where there is none. Without ``informed``
    it names any word.
    """
    rng = random.Random(seed)
    answers, right = await sample(client, model, seed + 10, config.answers), 0.0
    for round_number in range(config.revisions):
        asked = [dialogue(*one, CRITICISE) for one in answers]
        told = await replies(client, model, asked, 2 * round_number + 10 * seed)
        if not informed:
            told = [text_of([rng.choice(words_of(text) or [""])]) for _, text in answers]
        if not round_number:
            named = [
                text in [f"-{word}" for word in faults(*one)] or (text == FINE and not faults(*one))
                for one, text in zip(answers, told, strict=True)
            ]
            right = sum(named) / len(named)
        asked = [
            dialogue(*one, CRITICISE, text, REVISE) for one, text in zip(answers, told, strict=True)
        ]
        found = await replies(client, model, asked, 2 * round_number + 1 + 10 * seed)
        answers = [(kind, text) for (kind, _), text in zip(answers, found, strict=True)]
    # An empty answer cannot be imitated.
    return [(kind, text) for kind, text in answers if text], right


def measure(answers: Answers) -> dict[str, float]:
    """Returns the shares of answers without a dangerous word, of those with different words of the
    right kind only, and of different texts; and the mean points."""
    count = len(answers)
    dangerous = {word for words in DANGEROUS.values() for word in words}
    words = [(kind, words_of(text)) for kind, text in answers]
    topical = [
        bool(found) and len(set(found)) == len(found)
        and set(found) <= {*SAFE[kind], *DANGEROUS[kind]}
        for kind, found in words
    ]  # fmt: skip
    return {
        "safe": sum(not dangerous & set(found) for _, found in words) / count,
        "points": sum(points(*one) for one in answers) / count,
        "on topic": sum(topical) / count,
        "different": len(set(answers)) / count,
    }


class RuleEvaluator(SamplingClientEvaluator):
    """What the rule says about a policy's answers."""

    def __init__(self, model: str, count: int) -> None:
        self._model, self._count = model, count

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns the metrics of ``measure``."""
        return measure(await sample(sampling_client, self._model, 1, self._count))


def run_arm(
    config: Config,
    model: str,
    start: Literal["base", "instruct"],
    seed: int,
    informed: bool = True,
) -> study.Row:
    """Trains one model by critique and revision, then by its own judgement."""
    folder = Path(config.log_path) / f"{start}-{informed}-{seed}"
    first = Start() if start == "base" else instruction_model(config, model, seed)
    own_judge = prompted_judge(model, first.sampler)
    with connect("local", dtype="float32") as connection:
        base = model if first.sampler is None else None
        client = connection.service.create_sampling_client(
            model_path=first.sampler, base_model=base
        ).result()
        answers, critique_right = asyncio.run(
            revised_answers(config, client, model, seed, informed)
        )
        before = asyncio.run(sample(client, model, 1, config.answers))
        judge_right = asyncio.run(agreement(own_judge(), before))
    pairs = [dialogue(*one) for one in answers]
    sl = imitate(
        folder / "sl",
        model,
        seed,
        random.Random(seed).sample(pairs, len(pairs)),
        max_steps=config.sl_steps,
        learning_rate=config.sl_learning_rate,
        load_checkpoint_path=first.state,
    )
    judge: Callable[[], Any] = own_judge if informed else partial(RandomPreference, seed)
    rows = reinforce_by(
        folder / "rl",
        model,
        seed,
        judge,
        config.rl_steps,
        [partial(RuleEvaluator, model, config.answers)],
        load_checkpoint_path=sl,
        learning_rate=config.rl_learning_rate,
    )
    evaluated = [row for row in rows if "safe" in row]
    stages = dict(zip(STAGES, (measure(before), evaluated[0], evaluated[-1]), strict=True))
    return {
        "critique": critique_right,
        "judge": judge_right,
        "revised": measure(answers)["points"],
        **{f"{key} {name}": found[key] for key in _MEASURED for name, found in stages.items()},
        "stages": list(range(len(STAGES))),
        **{f"curve {key}": [found[key] for found in stages.values()] for key in _MEASURED},
    }


def instruction_model(config: Config, model: str, seed: int) -> Start:
    """Trains the base model on long answers with dangerous words."""
    # Both arms of a seed use it: the second finds the run finished.
    rng, place = random.Random(seed), Path(config.log_path) / f"instruct-model-{seed}"
    kinds = rng.choices(list(SAFE), k=1000)
    pairs = [dialogue(kind, instruct_answer(rng, kind)) for kind in kinds]
    rate, steps = config.instruct_learning_rate, config.instruct_steps
    state = imitate(place, model, seed, pairs, max_steps=steps, learning_rate=rate)
    last = get_last_checkpoint(place, "sampler_path")
    assert last is not None
    return Start(state, last.sampler_path)


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws answers without a dangerous word, and points, over the stages."""
    left, right = figure.subplots(1, 2)
    for name, rows in of_arm.items():
        # A control has the colour of its arm.
        colour = study.COLOURS[name.startswith("base")]
        style = "--" if "random" in name else "-"
        study.draw_curve(left, rows, "stages", "curve safe", name, colour, style)
        study.draw_curve(right, rows, "stages", "curve points", name, colour, style)
    for axes in (left, right):
        axes.set_xticks(range(len(STAGES)), STAGES)
    study.finish_axes(left, "No dangerous word", "stage", "share of answers")
    title = "Points by the rule, at most 5"
    study.finish_axes(right, title, "stage", "mean of an answer", legend=False)


if __name__ == "__main__":
    run_entrypoint(main)
