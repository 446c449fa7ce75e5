"""The shorter answer wins: the judge, the recipe's settings, what it reports, and resuming."""

from __future__ import annotations

import asyncio

import pytest
from recipe_runs import RecipeRuns

from recipes.preference.shorter.env import (
    HELD_OUT,
    QUESTIONS,
    PreferenceModelShorter,
    ShorterComparisonBuilder,
    ShorterPreferenceModelBuilder,
)
from tinker_cookbook.preference.types import Comparison

OPTIM_STEP = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("four", "two", 1),
        ("two", "four", -1),
        ("one", "two", 0),
        (" two \n", "four", -1),
        ("", "four", 1),
        ("four", "  ", -1),
        ("", " ", 0),
    ],
)
def test_the_judge(first, second, expected):
    answers = ([{"role": "assistant", "content": text}] for text in (first, second))
    comparison = Comparison([{"role": "user", "content": "?"}], *answers)
    judge = ShorterPreferenceModelBuilder()()
    assert asyncio.run(judge(comparison)) == expected
    assert asyncio.run(judge(comparison.swap())) == -expected


def test_held_out_questions_are_others_and_prefer_their_short_answer():
    train_part, test_part = ShorterComparisonBuilder().get_labeled_comparisons()
    assert test_part is not None
    assert (len(train_part), len(test_part)) == (len(QUESTIONS), len(HELD_OUT)) == (24, 8)
    assert not set(QUESTIONS) & {question for question, _ in HELD_OUT}
    judge = PreferenceModelShorter()
    for labeled in test_part:
        assert labeled.label == "A"
        assert asyncio.run(judge(labeled.comparison)) == -1
        assert 7 <= len(labeled.comparison.completion_A[0]["content"].split()) <= 13


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stories_model):
    """The recipe on the story model, which ends hardly any answer of its own accord."""
    options = "max_tokens=16 learning_rate=0.005 max_steps=6 save_every=3 eval_every=100"
    recipe, folder = "recipes.preference.shorter.train", tmp_path_factory.mktemp("shorter")
    place = RecipeRuns(folder, stories_model, recipe, f"{options} test_group_size=2")
    straight = place.run("straight")
    assert straight.returncode == 0, straight.stderr[-2000:]
    return place


def test_a_run_reports_lengths_and_reward(runs):
    rows = runs.rows("straight")
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows[1:]:
        assert row["env/all/ac_tokens_per_turn"] <= 16
        # Wins and losses of a group cancel: what is left of the reward is the format.
        assert row["reward/total"] == pytest.approx(row["env/all/format"] - 1, abs=1e-6)
        assert row["env/all/win_minus_loss"] == pytest.approx(0, abs=1e-6)
    for row in (rows[0], rows[-1]):
        assert row["test/env/all/win_rate"] == pytest.approx(
            (1 + row["test/env/all/win_minus_loss"]) / 2
        )
