"""Can RLHF leave the reward model out, if the model itself can judge a little?

    python -m recipes.research.judge
    python -m recipes.research.judge seeds=0 rl_steps=10 log_path=…

A model lists words of a kind, and an exact rule says which of two lists is better. The answers of a
group are compared in pairs. All arms train the same model in the same way; they differ in who
compares: the model as it is before training, when it is prompted with two answers; a reward model,
which is the same model trained on comparisons with right labels; a random one (control); or the
rule.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import chz
import tinker

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.backends.connect import connect
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.preference.comparison import Comparison
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonDatasetBuilder,
    ComparisonSet,
)
from tinker_cookbook.preference.preference_model import (
    PreferenceModel,
    PreferenceModelBuilderFromChatRenderer,
)
from tinker_cookbook.recipes.research import study
from tinker_cookbook.recipes.research.runs import chat_data, reinforce_on, supervise
from tinker_cookbook.recipes.research.words_model import (
    MAX_TOKENS,
    SAFE,
    comparison,
    points,
    random_comparison,
    words_model,
)
from tinker_cookbook.recipes.tiny_models.dialogues import RENDERER, dialogue
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.rl.envs.preference_envs import (
    PairwisePreferenceRLDatasetBuilder,
    TournamentPattern,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import number, peak_rate
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

Answers = list[tuple[str, str]]
"""Pairs of a question and an answer."""
_MEASURED = ("true", "judged", "agreement", "points")


class RulePreference(PreferenceModel):
    """Prefers the answer with more points."""

    async def __call__(self, comparison: Comparison) -> float:
        """Returns -1 if the first is better, 1 if the second is, 0 for a tie."""
        kind = get_text_content(comparison.prompt_conversation[0])
        texts = (comparison.completion_A, comparison.completion_B)
        first, second = (points(kind, get_text_content(text[0])) for text in texts)
        return float(second > first) - float(second < first)


class RandomPreference(PreferenceModel):
    """Prefers either answer by chance."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    async def __call__(self, comparison: Comparison) -> float:
        """Returns -1 or 1."""
        return self._rng.choice((-1.0, 1.0))


@chz.chz
class WordComparisons(ComparisonDatasetBuilder):
    """Random comparisons with right labels; in RL only their questions are used."""

    count: int
    seed: int

    @cached_property
    def comparison_sets(self) -> tuple[ComparisonSet, None]:
        """Training comparisons."""
        rng, found = random.Random(self.seed), ComparisonSet()
        while len(found.usable) < self.count:
            # Equal answers are left out.
            found.add(len(found.usable), random_comparison(rng))
        return found, None


@chz.chz
class Config(study.StudyConfig):
    """Settings of the study."""

    log_path: str = cli_utils.default_log_path("research/judge")
    labels: list[int] = study.several([100, 1000], "Labelled comparisons of the reward models")
    rm_steps: int = number(100, "Steps of a reward model's training, of 32 comparisons", low=1)
    rm_learning_rate: float = peak_rate(1e-3, "Learning rate of the reward models")
    rl_steps: int = number(40, "RL steps of 4 questions with 8 answers each", low=1)
    rl_learning_rate: float = peak_rate(1e-3, "Learning rate of RL")
    test_answers: int = number(80, "Answers to each question in an evaluation", low=2)


def main(config: Config) -> None:
    """Runs the study."""
    config = config.resolved(rm_steps=2, rl_steps=2, test_answers=4)
    model = words_model(quick=config.quick)
    with connect("local", dtype="float32") as connection:
        client = connection.service.create_sampling_client(base_model=model).result()
        before = asyncio.run(sample(client, model, 0, config.test_answers))
    run = partial(run_arm, config, model, before)
    arms = {"prompted judge": partial(run, "prompted")}
    for count in config.labels:
        arms[f"reward model, {count} labels"] = partial(run, "trained", labels=count)
    arms["random judge"] = partial(run, "random")
    arms["the rule"] = partial(run, "rule")
    columns = {
        "agreement before": "right before",
        "agreement": "right after",
        "judged": "win rate, own judge",
        "true half way": "win rate, half way",
        "true": "win rate, end",
    }
    study.run_study(config, arms, columns, partial(draw, config))


async def sample(client: SamplingClient, model: str, seed: int, count: int) -> Answers:
    """Returns ``count`` answers to each question."""
    renderer = get_renderer(RENDERER, get_tokenizer(model))
    params = tinker.SamplingParams(
        max_tokens=MAX_TOKENS, stop=renderer.get_stop_sequences(), seed=seed
    )
    found: Answers = []
    for kind in SAFE:
        prompt = renderer.build_generation_prompt(dialogue(kind))
        response = await client.sample(prompt, count, params)
        messages = [renderer.parse_response(list(one.tokens))[0] for one in response.sequences]
        found += [(kind, get_text_content(message)) for message in messages]
    return found


class JudgeEvaluator(SamplingClientEvaluator):
    """Win rates against the answers before training, and how often the judge is right.

    ``true`` and ``judged`` are the win rates by the rule and by the judge; ``agreement`` is the
    share of pairs of the policy's own answers, without ties, in which the judge prefers the better.
    """

    def __init__(self, model: str, before: Answers, builder: Callable[[], PreferenceModel]) -> None:
        self._model, self._before, self._builder = model, before, builder

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns the metrics, and the mean ``points`` of an answer."""
        judge, rule = await asyncio.to_thread(self._builder), RulePreference()
        after = await sample(sampling_client, self._model, 1, len(self._before) // len(SAFE))
        against = [
            comparison(kind, old, new).comparison
            for (kind, old), (_, new) in zip(self._before, after, strict=True)
        ]
        true = await asyncio.gather(*map(rule, against))
        # Half of them, since the judge takes most of the study's time.
        judged = await asyncio.gather(*map(judge, against[::2]))
        return {
            "true": _win_rate(true),
            "judged": _win_rate(judged),
            "agreement": await agreement(judge, after),
            "points": sum(points(*one) for one in after) / len(after),
        }


async def agreement(judge: PreferenceModel, answers: Answers) -> float:
    """Returns how often the judge prefers the better of two answers, among pairs without ties."""
    # Neighbours answer the same question.
    pairs = [
        comparison(kind, one, two)
        for (kind, one), (_, two) in zip(answers[::2], answers[1::2], strict=True)
    ]
    pairs = [pair for pair in pairs if pair.label != "Tie"]
    verdicts = await asyncio.gather(*(judge(pair.comparison) for pair in pairs))
    right = [(v > 0) == (p.label == "B") for v, p in zip(verdicts, pairs, strict=True)]
    return sum(right) / len(right) if right else 0.5


def _win_rate(preferences: Sequence[float]) -> float:
    return sum((value + 1) / 2 for value in preferences) / len(preferences)


def run_arm(
    config: Config,
    model: str,
    before: Answers,
    kind: Literal["prompted", "trained", "random", "rule"],
    seed: int,
    labels: int = 0,
) -> study.Row:
    """Trains the reward model, if there is one, then the policy; returns the measurements."""
    folder = Path(config.log_path) / f"{kind}-{labels}-{seed}"
    weights = train_reward_model(config, folder / "rm", model, seed, labels) if labels else None
    others = {"random": partial(RandomPreference, seed), "rule": RulePreference}
    judge = others.get(kind) or prompted_judge(model, weights)
    rows = reinforce_by(
        folder / "rl",
        model,
        seed,
        judge,
        config.rl_steps,
        [partial(JudgeEvaluator, model, before, judge)],
        learning_rate=config.rl_learning_rate,
    )
    rows = [row for row in rows if "true" in row]
    return {
        "agreement before": rows[0]["agreement"],
        "true half way": rows[len(rows) // 2]["true"],
        **{key: rows[-1][key] for key in _MEASURED},
        "steps": [row["step"] for row in rows],
        **{f"curve {key}": [row[key] for row in rows] for key in _MEASURED},
    }


def prompted_judge(model: str, weights: str | None) -> PreferenceModelBuilderFromChatRenderer:
    """Returns a model as judge: with the weights of a run, or as it is."""
    return PreferenceModelBuilderFromChatRenderer(
        model_name=model,
        renderer_name=RENDERER,
        rm_weights_path=weights,
        both_orders=True,
        backend="local",
        dtype="float32",
    )


def reinforce_by(
    folder: Path,
    model: str,
    seed: int,
    judge: Callable[[], PreferenceModel],
    steps: int,
    evaluators: list[Callable[[], SamplingClientEvaluator]],
    **settings: Any,
) -> list[dict[str, float]]:
    """Trains by comparisons of answers in pairs; returns the metrics, every ten steps with those of
    the evaluators."""
    data = PairwisePreferenceRLDatasetBuilder(
        comparison_builder=WordComparisons(count=4 * steps, seed=seed),
        batch_size=4,
        group_size=8,
        policy_renderer_name=RENDERER,
        policy_model_name=model,
        preference_model_builder=judge,
        # A model as judge scores both orders itself.
        tournament_pattern=TournamentPattern.ALL_PAIRS_ONE_WAY,
        num_test=0,
    )
    return reinforce_on(
        folder,
        model,
        seed,
        data,
        evaluator_builders=evaluators,
        max_tokens=MAX_TOKENS,
        max_steps=steps,
        eval_every=10,
        **settings,
    )


def train_reward_model(config: Config, folder: Path, model: str, seed: int, labels: int) -> str:
    """Trains on comparisons with right labels; returns the path of the weights."""
    data = ChatDatasetBuilderFromComparisons(
        common_config=chat_data(model),
        comparison_builder=WordComparisons(count=labels, seed=1000 + seed),
    )
    rate = config.rm_learning_rate
    supervise(folder, model, seed, data, max_steps=config.rm_steps, learning_rate=rate)
    last = get_last_checkpoint(folder, "sampler_path")
    assert last is not None
    return str(last.sampler_path)


def draw(config: Config, figure: Any, of_arm: dict[str, list[study.Row]]) -> None:
    """Draws the win rates by the rule, and how often each judge is right, over the steps."""
    left, right = figure.subplots(1, 2)
    for (name, rows), colour in zip(of_arm.items(), study.COLOURS, strict=False):
        study.draw_curve(left, rows, "steps", "curve true", name, colour)
        if name not in ("the rule", "random judge"):
            study.draw_curve(right, rows, "steps", "curve agreement", name, colour)
    title = "Against the answers before training"
    study.finish_axes(left, title, "RL step", "win rate by the rule", legend=False)
    left.set_ylim(0.35, 1)  # room for the legend
    left.legend(fontsize=8, loc="upper left")
    title = "Pairs of the policy's answers"
    study.finish_axes(right, title, "RL step", "judge is right", legend=False)


if __name__ == "__main__":
    run_entrypoint(main)
