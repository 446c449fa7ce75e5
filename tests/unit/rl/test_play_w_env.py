"""A person plays an environment."""

from __future__ import annotations

import asyncio
import io
import sys

import byte_tokenizer
import pytest
from rollout_samples import Steps, prompt

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.official.rl_play_w_env import (
    Config,
    main,
    play_env,
)
from tinker_cookbook.rl.types import StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments


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


def test_from_the_command_line(monkeypatch, capsys, tokenizer):
    builder = "dataset_builder"
    arguments = [
        f"{builder}=recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder",
        f"{builder}.model_name_for_tokenizer={byte_tokenizer.NAME}",
        f"{builder}.renderer_name=role_colon",
        f"{builder}.batch_size=1",
        f"{builder}.group_size=2",
        f"model_name={byte_tokenizer.NAME}",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("7\n"))
    asyncio.run(main(parse_arguments(Config, arguments)))
    shown = capsys.readouterr().out
    assert "Assistant:" in shown
    assert "end: completed" in shown
    for wrong in ("member=2", "group=1", "batch=-1"):
        with pytest.raises(ConfigurationError, match=f"{wrong[:-2].rstrip('=')}: got "):
            asyncio.run(main(parse_arguments(Config, [*arguments, wrong])))
