"""Mistakes on command lines that used to pass without a word."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from recipes import own_loop, rl_basic, sl_basic
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec, Target
from tinker_cookbook.engine.model.resolve import check_rank, hidden_size
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.config import load_config, write_config
from tinker_cookbook.sweep.results import metric_note
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

# --- the rank of an adapter --------------------------------------------------------------------


def test_a_rank_beyond_the_layers_is_refused_before_anything_is_made(stories_model):
    cli = parse_arguments(
        sl_basic.CLIConfig,
        [f"model_name={stories_model}", "renderer_name=role_colon", "lora_rank=100000"],
    )
    with pytest.raises(ConfigurationError, match="lora_rank: got 100000, expected at most 256"):
        cli.resolved()
    target = Target("q_proj", "attn", 512, 2048)
    with pytest.raises(ConfigurationError, match="rank: got 513, expected at most 512"):
        Adapter.create(AdapterSpec(513, train_mlp=False, train_unembed=False), [target], 0, "cpu")


def test_ranks_that_pass():
    check_rank(256, 16)  # a tiny model with the settings of a large one
    check_rank(4096, 4096)
    assert hidden_size({"hidden_size": 8}) == 8
    assert hidden_size({"text_config": {"hidden_size": 9}}) == 9
    assert hidden_size({}) is None


# --- reinforcement learning --------------------------------------------------------------------


def test_a_group_of_one_is_refused_before_the_start(stories_model):
    given = [f"model_name={stories_model}", "renderer_name=role_colon", "group_size=1"]
    cli = parse_arguments(rl_basic.CLIConfig, given)
    with pytest.raises(ConfigurationError, match="group_size: got 1, expected at least 2; an ep"):
        cli.resolved()
    # A penalty towards a reference gives each token a reward of its own.
    cli = parse_arguments(rl_basic.CLIConfig, [*given, "kl_penalty_coef=0.1"])
    assert cli.resolved().dataset_builder.group_size == 1


# --- others ------------------------------------------------------------------------------------


def test_a_list_ends_before_the_next_sentence():
    with pytest.raises(ConfigurationError, match=r"example, no_robots\. Your own data go"):
        sl_basic.CLIConfig(dataset="imdb").build_dataset()
    with pytest.raises(ConfigurationError, match=r"did you mean 'example'\? Your own data go"):
        sl_basic.CLIConfig(dataset="exampel").build_dataset()


@pytest.mark.parametrize(("metric", "said"), [("train_mean_nll", True), ("test/nll", False)])
def test_a_sweep_says_when_it_compares_training_losses(metric, said, capsys):
    assert ("held-out" in str(metric_note(metric))) is said


def test_a_config_that_cannot_be_rebuilt_is_refused_in_one_step(tmp_path):
    write_config(tmp_path / "config.json", {"outer": {"inner": lambda: None}})
    with pytest.raises(ConfigurationError, match="cannot be rebuilt") as caught:
        load_config(tmp_path)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert len(caught.traceback) <= 3


# --- settings of the engine --------------------------------------------------------------------


def test_every_recipe_that_connects_passes_the_settings_of_the_engine():
    without = []
    for path in Path(own_loop.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "connect":
                names = {keyword.arg for keyword in node.keywords}
                without += [path.name] if "engine_settings" not in names else []
    # With base_dtype=int8 these would have used the whole model without a word.
    assert without == []
