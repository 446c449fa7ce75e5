"""Arguments as a person types them: nested objects, second names, wrong keys, missing ones."""

from __future__ import annotations

import chz
import pytest

from tinker_cookbook.distillation import sdft, train_off_policy, train_on_policy
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.official.keys import KEYS
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.run.config import write_config
from tinker_cookbook.supervised import train
from tinker_cookbook.training.config import TrainingConfig
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments
from tinker_cookbook.utils.command_line.foreign_names import hint_for
from tinker_cookbook.utils.command_line.help import help_text
from tinker_cookbook.utils.command_line.keys import keys_of

FILE = "tinker_cookbook.supervised.conversation_file:FromConversationFileBuilder"
COMMON = "dataset_builder.common_config"
RUN = ["log_path=/tmp/x", "model_name=m"]
DATA = [
    f"dataset_builder={FILE}",
    "dataset_builder.file_path=a.jsonl",
    f"{COMMON}.model_name_for_tokenizer=m",
    f"{COMMON}.renderer_name=role_colon",
    f"{COMMON}.batch_size=4",
]


def refusal(config_class, *arguments):
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(config_class, list(arguments))
    return str(caught.value)


@pytest.mark.parametrize(
    "loop", [train, rl_train, train_off_policy, train_on_policy, train_dpo, sdft]
)
def test_no_loop_loses_the_bounds_of_a_common_setting(loop):
    fields = chz.chz_fields(loop.Config)
    common = chz.chz_fields(TrainingConfig)
    assert sum(bool(field._validator) for field in common.values()) == 21
    assert not [n for n, f in common.items() if f._validator and not fields[n]._validator]


@chz.chz
class Folder:
    path: str = chz.field(doc="Folder of the results")


@chz.chz
class OtherFolder(Folder):
    path: str = "/tmp/other"


def test_a_default_that_a_subclass_changes_keeps_the_description():
    (key,) = keys_of(OtherFolder)
    assert (key.meaning, key.default) == ("Folder of the results", "/tmp/other")


# --- nested objects ----------------------------------------------------------------------------


def test_a_nested_object_is_chosen_and_set():
    config = parse_arguments(train.Config, [*RUN, *DATA])
    assert config.dataset_builder.common_config.batch_size == 4
    assert config.dataset_builder.file_path == "a.jsonl"


def test_all_that_is_missing_is_named_a_base_class_too():
    said = refusal(train.Config)
    assert said.startswith("log_path, model_name, dataset_builder: got no values")
    assert "dataset_builder=module:Class" in said
    assert refusal(train.Config, *RUN).startswith("dataset_builder: got no value, and it is")
    assert refusal(rl_train.Config, *RUN, "max_tokens=4").startswith("dataset_builder: got no")
    assert "dataset_configs.0.KEY=…" in refusal(train_off_policy.Config, *RUN)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (f"dataset_builder={FILE}s", ["no attribute", "mean 'FromConversationFileBuilder'"]),
        ("dataset_builder=no.such:Thing", ["module:Class", "No module named 'no'"]),
        (
            "dataset_builder=tinker_cookbook.rl.train:Config",
            ["expected module:Class, a SupervisedDatasetBuilder; Config is none"],
        ),
    ],
)
def test_invalid_class_is_refused(argument, words):
    said = refusal(train.Config, *RUN, argument)
    assert said.startswith("dataset_builder: got ")
    for word in words:
        assert word in said


def test_wrong_keys_and_values_within():
    said = refusal(train.Config, *RUN, *DATA, "dataset_builder.file_pth=x")
    assert "did you mean 'dataset_builder.file_path'?" in said
    said = refusal(train.Config, *RUN, *DATA[:-1], f"{COMMON}.batch_size=many")
    assert said == f"{COMMON}.batch_size: got 'many', expected a whole number"
    said = refusal(rl_train.Config, *RUN, "max_tokens=4", "loss_fn_config.a=b")
    assert said == "loss_fn_config.a: got 'b', expected a value of type float"


def test_an_optional_object_needs_all_of_its_keys():
    said = refusal(rl_train.Config, *RUN, "max_tokens=4", "async_config.max_steps_off_policy=2")
    assert "async_config.groups_per_batch: got no" in said


def test_help_lists_the_keys_of_the_chosen_class():
    chosen = {"dataset_builder": FILE}
    names = [key.name for key in keys_of(train.Config, chosen)]
    assert "dataset_builder.file_path" in names
    assert f"{COMMON}.batch_size" in names
    shown = help_text(train.Config, "python -m x", chosen=chosen)
    assert f"\n  {COMMON}.batch_size\n" in shown
    assert "file_path" not in help_text(train.Config, "python -m x")


# --- twice, and second names -------------------------------------------------------------------


KEYS[f"{__name__}.Named"] = {"groups": "groups_per_batch", "async_config.steps": "steps"}


@chz.chz
class Named:
    """Two keys with second names."""

    groups_per_batch: int = chz.field(default=8, doc="Groups")
    steps: int = chz.field(default=1, doc="Steps")


@chz.chz
class Inherits(Named):
    """Has a field of the name itself."""

    groups: int = chz.field(default=0, doc="Another thing")


def test_second_names():
    config = parse_arguments(Named, ["--groups=3", "async_config.steps=4"])
    assert (config.groups_per_batch, config.steps) == (3, 4)
    assert "Also: groups" in help_text(Named, "x")
    inherits = parse_arguments(Inherits, ["groups=3"])
    assert (inherits.groups, inherits.groups_per_batch) == (3, 8)


# --- settings from a file ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "steps: 4\ngroups: 3\n"),
        ("run.yml", "groups_per_batch: 3\nsteps: 7\n"),
        ("run.json", '{"groups_per_batch": 3, "async_config": {"steps": 4}}'),
    ],
)
def test_keys_of_a_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = parse_arguments(Named, [f"config={tmp_path / name}", "steps=4"])
    assert (config.groups_per_batch, config.steps) == (3, 4)


def test_the_recorded_settings_of_a_run(tmp_path):
    first = parse_arguments(train.Config, [*RUN, *DATA, "learning_rate=0.5", "save_every=7"])
    write_config(tmp_path / "config.json", first)
    source = f"config={tmp_path}"
    assert parse_arguments(train.Config, [source]) == first
    # The command line comes first, also for a part of a nested object.
    other = parse_arguments(train.Config, [source, "seed=3", f"{COMMON}.batch_size=8"])
    assert (other.seed, other.save_every, other.learning_rate) == (3, 7, 0.5)
    common = other.dataset_builder.common_config
    assert (common.batch_size, common.renderer_name) == (8, "role_colon")
    assert other.dataset_builder.file_path == "a.jsonl"
    said = refusal(Named, source)
    assert "was written by a tinker_cookbook.supervised.train:Config, expected a Named" in said
    assert f"-m tinker_cookbook.supervised.train config={tmp_path}" in said


@pytest.mark.parametrize(
    ("path", "is_there", "is_here", "moves"),
    [
        ("a.jsonl", True, False, True),
        ("rows/a", True, False, True),
        ("a.jsonl", True, True, False),
        ("org/name", False, False, False),  # of the Hub
        ("rows", True, False, False),  # a word, perhaps of something else
        ("a" * 300 + ".jsonl", False, False, False),
    ],
)
def test_recorded_paths_mean_the_folder_in_which_the_run_began(
    tmp_path, monkeypatch, path, is_there, is_here, moves
):
    for folder, has_file in (("there", is_there), ("here", is_here)):
        (tmp_path / folder).mkdir()
        if has_file:
            (tmp_path / folder / path).parent.mkdir(exist_ok=True)
            (tmp_path / folder / path).touch()
    monkeypatch.chdir(tmp_path / "there")
    words = [word.replace("a.jsonl", path) for word in (*RUN, *DATA)]
    write_config(tmp_path / "config.json", parse_arguments(train.Config, words))
    monkeypatch.chdir(tmp_path / "here")
    found = parse_arguments(train.Config, [f"config={tmp_path}"]).dataset_builder.file_path
    assert found == (str(tmp_path / "there" / path) if moves else path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("- 1", "has no keys"),
        ("stps: 1", "did you mean 'steps'"),
        ("steps: two", "steps: got 'two', expected a whole number"),
        ("steps: ['1,2', '3']", "steps: got ['1,2', '3'], expected values without commas"),
        ("steps: [{x: 1}]", "steps.0.x: there is no such key"),
    ],
)
def test_invalid_files_are_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "a.yaml").write_text(text)
    assert said in refusal(Named, f"config={tmp_path / 'a.yaml'}")


# --- help --------------------------------------------------------------------------------------


def test_help_groups_its_keys_and_shows_examples():
    from recipes import sl_basic

    shown = help_text(sl_basic.CLIConfig, "python -m recipes.sl_basic", sl_basic.__doc__)
    titles = ["Examples", "Task", "Training", "Checkpoints", "Evaluation and logging", "Backend"]
    places = [shown.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    assert shown.count("\n  python -m recipes.sl_basic") == 2
    assert shown.index("\n  learning_rate ") < shown.index("\n  adam_beta1 ")
    assert all(len(line) <= 100 for line in shown.splitlines())


# --- names of other libraries ------------------------------------------------------------------


ANSWERS = {
    "lr": "did you mean 'learning_rate'",
    "output_dir": "did you mean 'log_path'",
    "num_train_epochs": "did you mean 'num_epochs'",
    "per_device_train_batch_size": "did you mean 'groups_per_batch'",
    "num_generations": "did you mean 'group_size'",
    "beta": "did you mean 'kl_penalty_coef'",
    "max-grad-norm": "did you mean 'grad_clip_norm'",
    "R": "did you mean 'lora_rank'",
    "resume_from_checkpoint": "did you mean 'behavior_if_log_dir_exists'",
}


def test_names_of_other_libraries():
    from recipes import rl_basic

    keys = [key.name for key in keys_of(rl_basic.CLIConfig)]
    wrong = {name: hint_for(name, keys) for name, said in ANSWERS.items()
             if said not in hint_for(name, keys)}  # fmt: skip
    assert not wrong
    # A hint names only what the program has.
    assert hint_for("lr", ["sft_learning_rate"]) == "; did you mean 'sft_learning_rate'?"
    assert hint_for("lr", ["metrics"]) == ""
    for name in ("num_generations", "group_size"):
        keys = ["dataset_builder.group_size", "model_name"]
        assert hint_for(name, keys) == "; did you mean 'dataset_builder.group_size'?"
