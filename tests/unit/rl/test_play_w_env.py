"""A person plays an environment."""

from __future__ import annotations

import asyncio

import byte_tokenizer
import pytest
from rollout_samples import Steps, prompt

from tinker_cookbook.official.rl_play_w_env import (
    play_env,
)
from tinker_cookbook.rl.types import StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    with byte_tokenizer.registered():
        yield get_tokenizer(byte_tokenizer.NAME)


class Talk(Steps):
    """Two turns in text; the second prompt begins with the first and the answer."""

    def __init__(self, tokenizer, stop):
        super().__init__(tokenizer.encode("Q1:"), turns=2)
        self.tokenizer, self.stop, self.answers = tokenizer, stop, []

    async def initial_observation(self):
        return prompt(*self.tokens), self.stop

    async def step(self, action, *, extra=None):
        self.answers.append(self.tokenizer.decode(action))
        self.tokens += [*action, *self.tokenizer.encode("Q2:")]
        done = len(self.answers) == 2
        return StepResult(0.5, done, prompt(*self.tokens), self.stop, {"m": 1}, {"why": "so"})


def play(env, tokenizer, *typed, **options):
    lines, shown = list(typed), []

    def read(_):
        if not lines:
            raise EOFError
        return lines.pop(0)

    options = {"multiline": False, **options}
    return asyncio.run(play_env(env, tokenizer, read=read, show=shown.append, **options)), shown


def test_play_an_episode(tokenizer):
    env = Talk(tokenizer, [0])
    trajectory, shown = play(env, tokenizer, "one", "two\\", "lines")
    assert env.answers == ["one</s>", "two\nlines</s>"]  # ended as the model would end it
    assert trajectory is not None
    assert trajectory.reward == 1.0
    assert shown[1:3] == ["Q1:", "turn 1: reward 0.5, m 1\n  why: so"]
    assert shown[3] == "Q2:"  # only what is new
    assert shown[-1] == "end: completed, reward 1"
    assert trajectory.transitions[0].ac.maybe_logprobs is None
