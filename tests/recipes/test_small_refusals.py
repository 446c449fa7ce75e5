"""Mistakes on command lines that would pass without a word."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from recipes import own_loop, rl_basic, sl_basic
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec, Target
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments


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


def test_a_group_of_one_is_refused_before_the_start(stories_model):
    given = [f"model_name={stories_model}", "renderer_name=role_colon", "group_size=1"]
    cli = parse_arguments(rl_basic.CLIConfig, given)
    with pytest.raises(ConfigurationError, match="group_size: got 1, expected at least 2; an ep"):
        cli.resolved()
    # A penalty towards a reference gives each token a reward of its own.
    cli = parse_arguments(rl_basic.CLIConfig, [*given, "kl_penalty_coef=0.1"])
    assert cli.resolved().dataset_builder.group_size == 1


def test_every_recipe_that_connects_passes_the_settings_of_the_engine():
    without = []
    folder = Path(own_loop.__file__).parent
    # Studies have no settings of the engine: their models are tiny.
    for path in set(folder.rglob("*.py")) - set((folder / "research").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "connect":
                names = {keyword.arg for keyword in node.keywords}
                without += [path.name] if "engine_settings" not in names else []
    # With base_dtype=int8 these would have used the whole model without a word.
    assert without == []
