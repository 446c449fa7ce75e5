"""Keys of the original cookbook's programs (0.6.1): who types them here gets what they mean there.

The keys are those of ``official_names.json``; what is left out stands with its reason.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re

import chz
import pytest
from recipe_runs import REPO

from recipes import rl_basic, rl_loop, sl_basic
from recipes.distillation import on_policy_multi_teacher
from recipes.math_rl import train as math_rl
from recipes.preference.rlhf import settings as rlhf
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments
from tinker_cookbook.utils.command_line.keys import aliases_of, keys_of


def source(module):
    file = (REPO / module.replace(".", "/")).with_suffix(".py")
    return file.read_text() if file.is_file() else ""


OFFICIAL = json.loads((REPO / "tests" / "conformance" / "official_names.json").read_text())["names"]
CLASSES = ("CLIConfig", "Config", "BenchmarkConfig", "ExperimentConfig")
PROGRAMS = [
    name
    for name, classes in OFFICIAL.items()
    if re.match(r"tinker_cookbook\.(recipes|supervised|rl|preference|distillation)\.", name)
    and {*CLASSES} & classes.keys()
    and re.search(r"^(async )?def main\(|^main = ", source(name), re.MULTILINE)
]
MISSING = {"tinker_cookbook.distillation.sdft": {"loss_fn"}}  # this loop has one
NESTED = [
    ("recipes.rl_basic", "async_config.max_steps_off_policy"),
    ("recipes.rl_basic", "async_config.groups_per_batch"),
    ("recipes.math_rl.train", "stream_minibatch_config.num_minibatches"),
    ("recipes.math_rl.train", "stream_minibatch_config.groups_per_batch"),
    ("recipes.rl_basic", "dataset_builder.batch_size"),
    ("recipes.rl_basic", "kl_reference_config.base_model"),
    ("recipes.sl_basic", "dataset_builder.common_config.batch_size"),
    ("recipes.sl_basic", "dataset_builder.file_path"),
]
ALIASES = [
    ("recipes.rl_basic", "batch_size", "groups_per_batch"),
    ("recipes.rl_basic", "num_batches", "n_batches"),
    ("recipes.math_rl.train", "batch_size", "groups_per_batch"),
    ("recipes.rl_loop", "batch_size", "groups_per_batch"),
    ("recipes.code_rl.train", "log_dir", "log_path"),
    ("recipes.distillation.on_policy_distillation_harbor_multi_turn", "task_name", "dataset"),
    ("recipes.rl_loop", "max_steps", "num_steps"),
    ("recipes.rl_loop", "n_batches", "num_steps"),
    ("recipes.multiplayer_rl.guess_number.train", "num_batches", "n_batches"),
    ("recipes.preference.rlhf.rlhf_pipeline", "base_model", "model_name"),
]


def config_of(program):
    main = importlib.import_module(program).main
    first = next(iter(inspect.signature(main).parameters))
    return inspect.get_annotations(main, eval_str=True)[first]


def names_of(program):
    config = config_of(program)
    keys = {key.name for key in keys_of(config)} | set(aliases_of(config))
    # `async_config` is there where its own keys are.
    return keys | {name.partition(".")[0] for name in keys}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_key_is_there(program):
    classes = OFFICIAL[program]
    keys = {word.partition("=")[0] for word in next(classes[n] for n in CLASSES if n in classes)}
    assert keys - names_of(program) - MISSING.get(program, set()) == set()


@pytest.mark.parametrize(("program", "key"), NESTED)
def test_nested_keys(program, key):
    assert key in names_of(program)


@pytest.mark.parametrize(("program", "alias", "key"), ALIASES)
def test_second_names(program, alias, key):
    value = "m" if key == "model_name" else "16"
    config = parse_arguments(config_of(program), [f"{alias}={value}"])
    assert str(getattr(config, key)) == value


# --- what they mean ----------------------------------------------------------------------------


def resolved(cli):
    return chz.replace(cli, dataset_builder=RLDatasetBuilder()).resolved()


def test_async_and_streaming_settings_reach_the_loop(stories_model):
    given = [f"model_name={stories_model}", "renderer_name=role_colon"]
    cli = parse_arguments(
        rl_basic.CLIConfig,
        [*given, "async_config.max_steps_off_policy=2", "async_config.groups_per_batch=4"],
    )
    config = resolved(cli).async_config
    assert config is not None
    assert (config.max_steps_off_policy, config.groups_per_batch) == (2, 4)
    cli = parse_arguments(
        math_rl.CLIConfig,
        [
            *given,
            "stream_minibatch_config.num_minibatches=2",
            "stream_minibatch_config.groups_per_batch=8",
        ],
    )
    assert getattr(resolved(cli).stream_minibatch_config, "num_minibatches", None) == 2
    cli = parse_arguments(
        math_rl.CLIConfig,
        [
            *given,
            "max_steps_off_policy=1",
            "async_config.max_steps_off_policy=2",
            "async_config.groups_per_batch=8",
        ],
    )
    with pytest.raises(ConfigurationError, match="max_steps_off_policy=1 and async_config"):
        resolved(cli)


def test_failed_episodes_may_be_left_out(stories_model):
    given = [f"model_name={stories_model}", "renderer_name=role_colon"]
    cli = parse_arguments(rl_basic.CLIConfig, [*given, "rollout_error_tolerance=True"])
    assert resolved(cli).rollout_error_tolerance is True
    cli = parse_arguments(rl_basic.CLIConfig, given)
    assert resolved(cli).rollout_error_tolerance is None


def test_short_names_of_two_teachers():
    cli = parse_arguments(
        on_policy_multi_teacher.CLIConfig,
        ["deepmath_teacher_model=a", "tulu3_groups_per_batch=5", "tulu3_teacher_checkpoint=t"],
    )
    first, second = cli.part("first", "deepmath"), cli.part("second", "tulu3")
    assert (first.dataset, first.teacher_model, first.groups_per_batch) == ("deepmath", "a", None)
    assert (second.dataset, second.teacher_checkpoint) == ("tulu3", "t")
    assert second.groups_per_batch == 5


def test_the_short_name_of_a_pipeline():
    plain = parse_arguments(rlhf.CLIConfig, []).folder
    assert parse_arguments(rlhf.CLIConfig, ["short_name=tiny"]).folder.name == f"{plain.name}-tiny"
    given = parse_arguments(rlhf.CLIConfig, ["short_name=tiny", "log_path=/tmp/mine"])
    assert str(given.folder) == "/tmp/mine"


def test_the_loss_of_rl_loop(stories_model):
    given = [f"model_name={stories_model}", "renderer_name=role_colon", "learning_rate=1e-4"]
    config = parse_arguments(rl_loop.Config, [*given, "loss_fn=ppo"])
    assert rl_loop.resolve(config).loss_fn == "ppo"
    config = parse_arguments(rl_loop.Config, [*given, "loss_fn=grpo"])
    with pytest.raises(ConfigurationError, match="GRPO is loss_fn=importance_sampling or ppo"):
        rl_loop.resolve(config)


def test_builder_keys_of_sl_basic():
    cli = parse_arguments(
        sl_basic.CLIConfig,
        ["dataset_builder.common_config.batch_size=3", "dataset_builder.file_path=a.jsonl"],
    )
    assert (cli.batch_size, cli.dataset_path) == (3, "a.jsonl")
