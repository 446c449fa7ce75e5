"""The RL recipes as commands: their help, what they derive, one step of each, and resuming."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from recipe_runs import REPO, RecipeRuns, finish, last_of_each
from tiny_model import make_tiny_model

from recipes import rl_basic
from recipes.math_rl import train as math_rl
from recipes.multiplayer_rl.guess_number import train as guess_number
from recipes.multiplayer_rl.twenty_questions import train as twenty_questions
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.run.config import load_config
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

pytestmark = pytest.mark.slow

MODULES = (
    "recipes.rl_basic",
    "recipes.rl_loop",
    "recipes.math_rl.train",
    "recipes.multiplayer_rl.text_arena.train",
    "tinker_cookbook.recipes.twenty_questions.train",
)
HEAVY = ("torch", "transformers", "datasets", "tinker", "math_verify", "pebble", "textarena")
HELP = f"""
import runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0, end.code
    print("LOADED", *(name for name in {HEAVY} if name in sys.modules))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def common(model, tmp_path) -> list[str]:
    """Arguments that make any of the recipes a matter of seconds."""
    small = "lora_rank=4 groups_per_batch=2 group_size=2 max_tokens=4"
    words = f"renderer_name=role_colon backend=local device=cpu dtype=float32 {small}"
    return [f"model_name={model}", f"log_path={tmp_path / 'run'}", *words.split()]


# --- the command line ------------------------------------------------------------------------


def test_help_lists_the_keys_and_loads_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", HELP, *MODULES],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *texts, end = done.stdout.split("LOADED\n")
    assert (len(texts), end) == (len(MODULES), ""), end[-300:]
    for module, text in zip(MODULES, texts, strict=True):
        assert text.startswith(f"python -m {module}")
        for key in ("group_size", "groups_per_batch", "learning_rate", "max_tokens", "log_path"):
            assert f"\n  {key} " in text, (module, key)


@pytest.mark.parametrize("recipe", [rl_basic, math_rl, guess_number, twenty_questions])
def test_the_documented_command_derives_renderer_and_learning_rate(recipe, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-not-a-key")
    arguments = ["model_name=meta-llama/Llama-3.1-8B", "log_path=/tmp/rl_training"]
    config = parse_arguments(recipe.CLIConfig, arguments).resolved()
    config.check()
    assert config.renderer_name == config.dataset_builder.renderer_name == "role_colon"
    assert config.learning_rate == pytest.approx(5e-4 * (2000 / 4096) ** 0.781 / 4)
    assert config.lr_schedule == "constant"
    assert config.log_path == "/tmp/rl_training"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["env=arithmetics"], "env: got 'arithmetics'.*did you mean 'arithmetic'"),
        (["env=reasoning_gym:chain_sm"], "did you mean 'chain_sum'"),
        (["dataset_path=x.jsonl"], "got x.jsonl, but env=arithmetic makes its own"),
        (["env=gsm8k", "dataset_path=x.jsonl"], "dataset_path: there is no file or folder x"),
        (["reasoning_gym_config.max_terms=3"], "reasoning_gym_config"),
    ],
)
def test_invalid_settings_are_refused(common, arguments, words):
    with pytest.raises((ConfigurationError, DataError), match=words):
        parse_arguments(math_rl.CLIConfig, last_of_each([*common, *arguments])).resolved().check()


# --- one step of each ------------------------------------------------------------------------

PROBLEMS = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
STEPS = {
    "rl_basic": (rl_basic, ["num_test=2", "eval_every=1"]),
    "kl penalty": (rl_basic, ["num_test=0", "kl_penalty_coef=0.1"]),
    "arithmetic": (math_rl, ["num_test=0", "include_fewshot=True"]),
    "gsm8k": (math_rl, ["env=gsm8k", "dataset_path=FOLDER/problems.jsonl"]),
    "math": (math_rl, ["env=math", "dataset_path=FOLDER/problems.jsonl", "num_substeps=2"]),
    "reasoning_gym": (math_rl, ["env=reasoning_gym:chain_sum", "num_test=2", "answer_tag=None"]),
    "guess_number": (guess_number, ["num_test=2"]),
    "twenty_questions": (twenty_questions, ["num_test=2", "max_questions=2"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_step(common, tmp_path, name):
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, PROBLEMS)))
    recipe, extra = STEPS[name]
    extra = [argument.replace("FOLDER", str(tmp_path)) for argument in extra]
    cli = parse_arguments(recipe.CLIConfig, last_of_each([*common, *extra, "max_steps=1"]))
    asyncio.run(recipe.main(cli))
    rows = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    last = rows[-1]
    assert last["env/all/total_episodes"] == 4
    assert -1 <= last["env/all/reward/total"] <= 1
    assert 0 <= last["env/all/correct"] <= 1
    if "num_test=2" in extra:
        assert 0 <= last["test/env/all/correct"] <= 1
    assert ("kl_policy_base" in last) == (name == "kl penalty")
    assert load_config(tmp_path / "run") == cli.resolved()


# --- the loop on one page --------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop(tmp_path_factory, model) -> RecipeRuns:
    """A finished run of ``recipes.rl_loop``."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "seven.jsonl").write_text('{"question": "What?", "answer": "7"}\n')
    options = f"""dataset_path={folder}/seven.jsonl num_steps=10 groups_per_batch=1 group_size=128
        max_tokens=6 lora_rank=8 learning_rate=0.03 save_every=3"""
    place = RecipeRuns(folder, model, "recipes.rl_loop", options)
    done = place.run("straight")
    assert done.returncode == 0, done.stderr[-2000:]
    return place


def test_the_loop_learns_to_say_seven(loop):
    rows = loop.rows("straight")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["progress/done_frac"] == 1
    rewards = [row["reward/total"] for row in rows]
    assert rewards[0] < 0.1
    assert max(rewards[-3:]) > 0.5, rewards
    assert all(abs(row.get("optim/kl_sample_train_v1", 0)) < 1e-4 for row in rows)


def test_a_loop_that_was_killed_goes_on_as_if_it_had_not_been(loop):
    optim_step = "tinker_cookbook.engine.training.run:TrainingRun.optim_step"
    killed = loop.run("killed", kill=[optim_step, "5", "after"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert 0 < len(loop.rows("killed")) < 10
    resumed = loop.run("killed", "resume")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert loop.rows("killed") == loop.rows("straight")
    assert loop.adapter("killed") == loop.adapter("straight")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("num_steps=0", "num_steps: got 0"),
        ("dataset_path=absent.jsonl", "there is no file or folder absent.jsonl"),
        ("model_name=smollm", "model_name: got 'smollm'"),
    ],
)
def test_loop_settings_that_cannot_work_delete_nothing(loop, argument, words):
    before = (loop.folder / "straight" / "metrics.jsonl").read_bytes()
    done = finish(loop.start(loop.command("straight", "delete", argument)))
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert (loop.folder / "straight" / "metrics.jsonl").read_bytes() == before
