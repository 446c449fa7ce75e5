"""Generators of reasoning-gym: by name, with settings, scored by themselves, within a time."""

from __future__ import annotations

import asyncio
import time

import byte_tokenizer
import pytest

from recipes.math_rl import reasoning_gym_env
from recipes.math_rl.reasoning_gym_env import (
    ReasoningGymDatasetBuilder,
    ReasoningGymEnv,
    make_generator,
)
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer

pytestmark = pytest.mark.usefixtures("bytes_registered")

pytest.importorskip("reasoning_gym", reason="the extra 'rl' is not installed")

GENERATORS = (
    "chain_sum",
    "basic_arithmetic",
    "letter_counting",
    "simple_equations",
    "gsm_symbolic",
)
TOKENIZER = byte_tokenizer.NAME


def builder(**settings) -> ReasoningGymDatasetBuilder:
    return ReasoningGymDatasetBuilder(
        **{
            "generator": "chain_sum",
            "model_name_for_tokenizer": TOKENIZER,
            "renderer_name": "role_colon",
            "batch_size": 4,
            "group_size": 2,
            "size": 10,
            "num_test": 5,
            **settings,
        }
    )


def env_of(generator: str, place: int = 0, **settings) -> ReasoningGymEnv:
    entry = make_generator(generator, {}, size=place + 1, seed=0)[place]
    renderer = get_renderer("role_colon", tokenizer_utils.get_tokenizer(TOKENIZER))
    return ReasoningGymEnv(generator, entry, renderer, scoring_timeout_seconds=60, **settings)


@pytest.mark.parametrize("generator", GENERATORS)
def test_gold_scores_one_and_rubbish_nothing(generator):
    for place in range(3):
        env = env_of(generator, place)
        gold = env.get_reference_answer()
        assert asyncio.run(env.check_answer(f"I think so. <answer>{gold}</answer>")) == 1
        assert asyncio.run(env.check_answer("<answer>banana banana</answer>")) == 0
        assert asyncio.run(env.check_answer(gold)) == 0  # not where it was asked for
        assert env.check_format(f"<answer>{gold}</answer>")
        assert not env.check_format(gold)
        assert "<answer>" in env.get_question()


def sleep_for_ever(*args: object) -> float:
    time.sleep(3600)
    return 1.0


def test_a_scorer_that_hangs_is_ended(monkeypatch, caplog):
    env = env_of("chain_sum")
    gold = f"<answer>{env.get_reference_answer()}</answer>"
    assert asyncio.run(env.check_answer(gold)) == 1
    env.scoring_timeout_seconds = 0.5
    monkeypatch.setattr(reasoning_gym_env, "_score", sleep_for_ever)
    assert asyncio.run(env.check_answer(gold)) == 0
    assert "chain_sum" in caplog.text
    monkeypatch.undo()
    env.scoring_timeout_seconds = 60
    assert asyncio.run(env.check_answer(gold)) == 1


def test_problems_repeat_and_those_of_evaluation_are_others():
    async def questions(made: ReasoningGymDatasetBuilder) -> list[list[str]]:
        found = []
        for dataset in await made():
            assert dataset is not None
            groups = [g for i in range(len(dataset)) for g in dataset.get_batch(i)]
            envs = [await group.make_env(0) for group in groups]
            found.append([env.get_question() for env in envs])
        return found

    train, test = asyncio.run(questions(builder()))
    assert (len(set(train)), len(set(test))) == (10, 5)
    assert not set(train) & set(test)
    assert asyncio.run(questions(builder())) == [train, test]
    assert asyncio.run(questions(builder(seed=1))) != [train, test]
    assert asyncio.run(builder(num_test=0)())[1] is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"generator": "chain_sm"}, "generator: got 'chain_sm'.*did you mean 'chain_sum'"),
        ({"config": {"min_trms": 3}}, "argument 'min_trms'.*its settings are .*min_terms"),
        ({"config": {"min_terms": -3}}, "chain_sum refuses .*min_terms must be positive"),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        builder(**settings).check()
