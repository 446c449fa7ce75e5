"""``rl.run``: an own task trained with one call, and what is refused before anything loads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tinker_cookbook import rl
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.problem_env import ProblemEnv

SMALL = {
    "renderer_name": "role_colon",
    "batch_size": 4,
    "group_size": 8,
    "max_tokens": 12,
    "learning_rate": 3e-3,
    "device": "cpu",
    "dtype": "float32",
    "save_every": 0,
}


class WordsWithS(ProblemEnv):
    """The reward is the share of words that begin with s."""

    def __init__(self, name, renderer):
        super().__init__(renderer)
        self.name = name

    def get_question(self):
        return f"Once upon a time, there was a little girl named {self.name}."

    def check_answer(self, sample_str):
        words = sample_str.lower().split()
        return sum(word.startswith("s") for word in words) / max(1, len(words))


@pytest.fixture
def model(stories_model):
    if not (Path(stories_model) / "model.safetensors").exists():
        pytest.skip(f"the trial model is absent: {stories_model}")
    return stories_model


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_own_task_is_learned_in_a_few_steps(model, tmp_path, capsys):
    folder = rl.run(
        env=WordsWithS,
        problems=["Lily", "Sue", "Mia", "Anna"],
        test_problems=["Ben"],
        model_name=model,
        max_steps=6,
        log_path=str(tmp_path / "run"),
        **SMALL,
    )
    assert folder == tmp_path / "run"
    # Runs without log_path have a folder for each task. The dataset's settings are not repeated.
    said = capsys.readouterr().out
    assert "recipe_name=rl_run_WordsWithS" in said
    assert said.count("renderer_name=") == 1
    found = rows(folder)
    rewards = [row["reward/total"] for row in found[1:]]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.2
    assert found[-1]["test/env/all/reward/total"] > found[0]["test/env/all/reward/total"]
    # check_format is not overridden: no format term, so the reward is the score.
    assert "env/all/format" not in found[1]
    assert found[1]["env/all/correct"] == pytest.approx(rewards[0])


def test_a_function_may_make_the_environment(model, tmp_path, capsys):
    def make(problem, renderer):
        return WordsWithS(problem["name"], renderer)

    work = rl.run_async(
        make, ({"name": "Lily"},), model, max_steps=1, log_path=str(tmp_path / "run"), **SMALL
    )
    assert rows(asyncio.run(work))[-1]["step"] == 1
    # Several scripts may have a function of this name.
    assert "recipe_name=rl_run_test_task_make" in capsys.readouterr().out


def test_an_environment_without_the_parameter_renderer_is_refused(model, tmp_path):
    with pytest.raises(ConfigurationError, match="missing a required argument: 'r'; give it"):
        rl.run(lambda p, r: WordsWithS(p, r), ["Lily"], model, log_path=str(tmp_path), **SMALL)
