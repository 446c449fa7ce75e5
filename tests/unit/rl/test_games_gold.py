"""The games pay 1 for a game that is won and nothing for rubbish; no model takes part."""

from __future__ import annotations

import asyncio
from functools import partial

import byte_tokenizer
import pytest
from scripted_policy import COMMON, RUBBISH, Script, play

from recipes.multiplayer_rl.guess_number.env import Game, GuessNumberEnv
from recipes.multiplayer_rl.twenty_questions.env import (
    WORDS,
    AnswererConfig,
    Rules,
    TwentyQuestionsDatasetBuilder,
    TwentyQuestionsEnv,
    make_game,
    read_words,
)
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.rollouts.group import do_group_rollout
from tinker_cookbook.rl.types import Env

pytestmark = pytest.mark.usefixtures("bytes_registered")


def correct(env: Env, *lines: str) -> float:
    """What a game says of itself, which must agree with what it paid."""
    trajectory = play(env, *lines)
    won = trajectory.metrics["correct"]
    assert (trajectory.reward == 1) == (won == 1)
    return won


# --- guess the number ------------------------------------------------------------------------


def guess_env(renderer, secret: int, **rules) -> Env:
    game = Game(**rules)
    env = GuessNumberEnv(secret, game)
    return EnvFromMessageEnv(renderer, env, failed_parse_reward=game.malformed_reward)


@pytest.mark.parametrize("secret", range(1, 8))
def test_halving_always_wins(renderer, secret):
    low, high, guesses = 1, 7, []
    while not guesses or guesses[-1] != secret:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if secret > guesses[-1] else (low, guesses[-1] - 1)
    trajectory = play(guess_env(renderer, secret), *map(str, guesses))
    assert trajectory.reward == 1
    assert trajectory.metrics["correct"] == 1
    assert len(trajectory.transitions) == len(guesses)


@pytest.mark.parametrize(
    ("guesses", "reward"),
    [
        (["1", "2", "3"], 0.0),
        (["I say 4", "5!"], 1.0),
        ([RUBBISH], -0.1),
        (["8"], -0.1),
        (["4.5"], -0.1),
        (["9" * 30], -0.1),
        (["4", RUBBISH], -0.1),
    ],
)
def test_guesses(renderer, guesses, reward):
    trajectory = play(guess_env(renderer, 5), *guesses)
    assert trajectory.reward == pytest.approx(reward)
    assert trajectory.metrics["correct"] == (reward == 1)


def test_a_range_without_numbers_is_refused():
    with pytest.raises(ConfigurationError, match="high: got 7"):
        Game(low=7)


# --- twenty questions ------------------------------------------------------------------------


class Knowing(MessageCompleter):
    """Says yes where the question has the letter that the word begins with."""

    def __init__(self, reply: str | None = None) -> None:
        self.reply, self.asked = reply, []

    async def __call__(self, messages: list[Message]) -> Message:
        self.asked.append(messages)
        return Message(role="assistant", content=self.reply or "yes, it is")


def questions_env(renderer, answerer: MessageCompleter | None = None, **rules) -> Env:
    env = TwentyQuestionsEnv("dog", answerer or Knowing(), Rules(**rules))
    return EnvFromMessageEnv(renderer, env, failed_parse_reward=-0.1)


def test_the_word_wins_and_rubbish_does_not(renderer):
    assert correct(questions_env(renderer), "Guess: dog") == 1
    assert correct(questions_env(renderer), "Does it bark?", "Is it a dog?") == 1
    assert correct(questions_env(renderer), *[RUBBISH] * 20) == 0
    assert correct(questions_env(renderer, max_questions=2), "Does it bark?", "Guess: cat") == 0
    assert correct(questions_env(renderer, max_questions=1), "Guess: dog") == 1


@pytest.mark.parametrize(
    ("reply", "passed_on", "unclear"),
    [
        ("Yes, dogs do.", "Yes.", 0),
        ("no", "No.", 0),
        ("  **No**", "No.", 0),
        ("Nobody knows", "I cannot say.", 1),
        ("The thing is a dog!", "I cannot say.", 1),
    ],
)
def test_only_yes_or_no_is_passed_on(renderer, reply, passed_on, unclear):
    answerer = Knowing(reply)
    env = TwentyQuestionsEnv("dog", answerer, Rules())

    async def first_answer() -> str:
        await env.initial_observation()
        result = await env.step(Message(role="assistant", content="Does it bark?"))
        return get_text_content(result.next_messages[-1])

    assert asyncio.run(first_answer()) == passed_on
    assert env.unclear == unclear
    told, asked = answerer.asked[0]
    assert "dog" in get_text_content(told)
    assert get_text_content(asked) == "Does it bark?"


def test_a_group_asks_the_answerer_it_is_given(renderer):
    answerer = Knowing()
    builder = ProblemGroupBuilder(partial(make_game, "dog", answerer, Rules(), renderer), 2)
    # The members of a group sample their first turn together, so they say the same here.
    group = asyncio.run(do_group_rollout(builder, SameForAll("Does it bark?", "Guess: dog")))
    assert group.get_total_rewards() == [1, 1]
    assert len(answerer.asked) == 2


class SameForAll(Script):
    """Says the n-th line in the n-th turn, whoever asks."""

    def derived(self, *path: int) -> SameForAll:
        other = SameForAll(*self.lines)
        if len(path) > 1:
            other.lines = self.lines[path[1] :]
        return other

    async def sample_many(self, model_input, stop, num_samples):
        return [await self.derived(0, 0)(model_input, stop) for _ in range(num_samples)]


def test_held_out_words_are_not_trained_on():
    builder = TwentyQuestionsDatasetBuilder(
        **COMMON,
        answerer=AnswererConfig(model_name=byte_tokenizer.NAME),
        rules=Rules(),
        num_test=16,
    )
    train, test = asyncio.run(builder())
    assert test is not None
    words = [
        {g.env_thunk.args[0] for i in range(len(d)) for g in d.get_batch(i)} for d in (train, test)
    ]
    assert words[0] | words[1] == set(read_words(str(WORDS)))
    assert not words[0] & words[1]
    assert len(words[1]) == 16


def test_words_of_a_file(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("# things\n\ndog\n...\nsea lion\n")
    assert read_words(str(words)) == ["dog", "sea lion"]
    words.write_text("# none\n")
    with pytest.raises(DataValidationError, match="has no word"):
        read_words(str(words))
    with pytest.raises(DataValidationError, match=r"words_path: .*absent.txt cannot be read"):
        read_words(str(tmp_path / "absent.txt"))
