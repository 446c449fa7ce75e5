"""The command line as a person meets it: help, wrong keys and values, existing folders."""

from __future__ import annotations

import importlib
import json
import os
import pty
import sys

import chz
import forks
import pytest
from recipe_runs import REPO, RecipeRuns, finish

from recipes import sl_basic, sl_loop
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import load_config
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

HEAVY = ("torch", "transformers", "datasets", "tinker", "peft", "wandb", "pandas")
LIST_MODULES = f"""
import runpy, sys
sys.argv = [sys.argv[1], "--help=all"]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 0, end.code
print("LOADED", *(name for name in {HEAVY} if name in sys.modules))
"""


@pytest.fixture(scope="module")
def recipe_runs(tmp_path_factory, stories_model):
    place = RecipeRuns(tmp_path_factory.mktemp("line"), stories_model)
    done = place.run("straight", "raise", "max_steps=2")
    assert done.returncode == 0, done.stderr[-2000:]
    return place


# --- help ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["recipes.sl_basic", "tinker_cookbook.recipes.sl_loop"])
def test_help_lists_every_key_and_loads_nothing_heavy(recipe_runs, module):
    done = finish(recipe_runs.start([sys.executable, "-c", LIST_MODULES, module], fresh=True))
    assert done.returncode == 0, done.stderr[-2000:]
    *shown, loaded = done.stdout.splitlines()
    assert loaded == "LOADED"
    text = " ".join(" ".join(shown).split())
    recipe = importlib.import_module(module)
    config = recipe.CLIConfig if hasattr(recipe, "CLIConfig") else recipe.Config
    for name, field in chz.chz_fields(config).items():
        if name.endswith("_builders") or name == "dataset_builder":
            continue
        meaning = " ".join(field._doc.split()).rstrip(".")
        assert f" {name} {meaning} [" in text, name
        entry = text.partition(f" {name} {meaning} [")[2].partition("]")[0]
        # An empty text is shown by its quotes.
        default = getattr(field._default, "value", field._default) or repr(field._default)
        assert entry.endswith(f"default {default}"), (name, entry)
        assert meaning, name


def test_help_is_quick(recipe_runs):
    def seconds() -> float:
        command = [sys.executable, "-m", "recipes.sl_basic", "--help"]
        begun = os.times()
        assert finish(recipe_runs.start(command, fresh=True)).returncode == 0
        ended = os.times()
        used = ended.children_user + ended.children_system
        return used - begun.children_user - begun.children_system

    # Processor time, and the first of some: what else runs here is not the recipe's doing.
    assert any(seconds() < 1.5 for _ in range(4))


# --- keys and values -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("learning_rat=1", ["learning_rat: there is no such key", "'learning_rate'", "--help"]),
        ("learning_rate=high", ["learning_rate: got 'high'", "a number or None"]),
        ("batch_size=1.5", ["batch_size: got '1.5'", "a whole number"]),
        ("train_mlp=maybe", ["train_mlp: got 'maybe'", "True or False"]),
        ("lr_schedule=cosin", ["got 'cosin'", "linear, cosine, constant", "mean 'cosine'"]),
        ("batchsize", ["got 'batchsize'", "expected key=value", "mean 'batch_size'", "--help"]),
    ],
)
def test_wrong_arguments(argument, words):
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(sl_basic.CLIConfig, [argument])
    for word in words:
        assert word in str(caught.value)


def test_arguments_are_taken_as_they_are_meant():
    config = parse_arguments(
        sl_loop.Config, ["learning_rate=3e-4", "--batch_size=2", "max_length=None"]
    )
    assert (config.learning_rate, config.batch_size, config.max_length) == (3e-4, 2, None)


def test_wrong_arguments_end_the_program_with_one_sentence(recipe_runs):
    done = finish(recipe_runs.start(recipe_runs.command("x", "raise", "learning_rat=1")))
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert done.stdout == ""
    assert not (recipe_runs.folder / "x").exists()


# --- an existing folder ----------------------------------------------------------------------


def test_config_json_rebuilds_the_resolved_config(recipe_runs):
    config = load_config(recipe_runs.folder / "straight")
    arguments = recipe_runs.arguments("straight", "raise")
    cli = parse_arguments(sl_basic.CLIConfig, [*arguments, "max_steps=2"])
    assert config == cli.resolved()
    assert type(config.dataset_builder).__name__ == "FromConversationFileBuilder"
    assert (config.learning_rate, config.dataset_builder.common_config.max_length) == (0.005, 512)


@pytest.mark.parametrize("behavior", ["raise", "ask"])
def test_refused_with_the_three_choices(recipe_runs, behavior):
    before = snapshot(recipe_runs)
    done = recipe_runs.run("straight", behavior)
    assert done.returncode == 1
    for choice in ("=resume", "=delete", "log_path="):
        assert choice in done.stderr
    if behavior == "ask":
        assert "no terminal" in done.stderr
    assert snapshot(recipe_runs) == before


@pytest.mark.slow
def test_ask_on_a_terminal(recipe_runs):
    command = recipe_runs.command("straight", "ask", "max_steps=2")
    code, seen = on_a_terminal(recipe_runs, command, b"what?\nq\n")
    assert code == 1
    assert seen.count("[r]esume, [d]elete or [q]uit?") == 2
    code, seen = on_a_terminal(recipe_runs, command, b"r\n")
    assert code == 0
    assert "This run is complete" in seen, seen[-3000:]
    before = json.loads(snapshot(recipe_runs)["checkpoints.jsonl"].splitlines()[-1])
    code, seen = on_a_terminal(recipe_runs, command, b"d\n")
    assert code == 0, seen[-2000:]
    after = json.loads(snapshot(recipe_runs)["checkpoints.jsonl"].splitlines()[-1])
    assert before["state_path"] != after["state_path"]
    assert [row["step"] for row in recipe_runs.rows("straight")] == [0, 1, 2]


def snapshot(place: RecipeRuns) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (place.folder / "straight").glob("*.*")}


def on_a_terminal(place: RecipeRuns, command: list[str], answer: bytes) -> tuple[int, str]:
    """Runs a command on a terminal of its own and types the answer to its first question."""
    ours, theirs = pty.openpty()
    environment = place.environment(COLUMNS="300")
    process = forks.Popen(
        command, cwd=REPO, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
            if answer and b"[q]uit?" in seen:
                os.write(ours, answer)
                answer = b""
    except OSError:  # Linux's way to say that the other side is closed
        pass
    finally:
        os.close(ours)
    return process.wait(timeout=60), seen.decode(errors="replace")
