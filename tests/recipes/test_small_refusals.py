"""Mistakes on command lines that used to pass without a word."""

from __future__ import annotations

import ast
from pathlib import Path

import chz
import pytest

from recipes import own_loop, rl_basic, sl_basic
from recipes.prompt_distillation import create_data
from recipes.prompt_distillation.create_data import check_length, resolve, task_of
from recipes.prompt_distillation.prompts import TeacherPrompt, misspelt_placeholder
from recipes.prompt_distillation.queries import Query
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec, Target
from tinker_cookbook.engine.model.resolve import check_rank, hidden_size
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.run.config import load_config, write_config
from tinker_cookbook.sweep.results import metric_note
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

# --- create_data -------------------------------------------------------------------------------


class File:
    """The two lists and paths of a file of distilled conversations."""

    def __init__(self, folder, kept, dropped):
        self.path, self.folder = folder / "a.jsonl", folder / "a.jsonl.run"
        self.kept = [{"messages": [{"role": "assistant", "content": said}]} for said in kept]
        self.dropped = [{"reason": reason} for reason in dropped]


def test_a_file_without_a_row_is_an_error(tmp_path, capsys):
    none_kept = File(tmp_path, [], ["cut off", "cut off", "no match"])
    create_data.print_summary(none_kept, {"yes": "yes"})
    assert "written to" not in capsys.readouterr().out
    with pytest.raises(DataValidationError, match=r"none of the 3 answers counts \(2 cut off, 1"):
        create_data.check_kept(none_kept)
    some = File(tmp_path, ["yes"], [])
    create_data.check_kept(some)
    create_data.print_summary(some, None)
    assert "written to" in capsys.readouterr().out


def test_labels_that_never_occur(tmp_path, capsys):
    file = File(tmp_path, ["no", "no"], [])
    create_data.print_summary(file, {"Yes": "yes", "no": "no"})
    assert "warning: labels: no answer kept is yes, so" in capsys.readouterr().out
    create_data.print_summary(file, {"no": "no"})
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("Say yes or no: {qery}", "{qery}"),
        ("{Query}", "{query}"),
        ("Say yes or no: {query}", None),
        ("As JSON: {answer}", None),
    ],
)
def test_a_misspelt_place_of_the_query(text, mark):
    assert misspelt_placeholder(TeacherPrompt((Message(role="user", content=text),))) == mark


def test_a_prompt_too_long_for_the_context_is_refused_before_loading(stories_model, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Answer with yes or no: {query}")
    given = {"teacher_model": stories_model, "renderer_name": "role_colon", "backend": "local"}
    config = resolve(create_data.Config(**given, teacher_prompt_file=str(prompt), max_tokens=500))
    queries = [Query("short"), Query("a longer query than that")]
    with pytest.raises(ConfigurationError, match=r"the context of .* is 512"):
        check_length(config, task_of(config), queries)
    fits = chz.replace(config, max_tokens=400)
    check_length(fits, task_of(fits), queries)


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
