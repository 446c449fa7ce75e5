"""Arguments as a person types them: nested objects, second names, wrong keys, missing ones."""

from __future__ import annotations

import re
from pathlib import Path

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
    "epochs": "did you mean 'num_epochs'",
    "batch": "did you mean 'groups_per_batch'",
    "per_device_train_batch_size": "did you mean 'groups_per_batch'",
    "steps": "did you mean 'max_steps'",
    "warmup": "did you mean 'warmup_steps'",
    "max_new_tokens": "did you mean 'max_tokens'",
    "num_generations": "did you mean 'group_size'",
    "beta": "did you mean 'kl_penalty_coef'",
    "model": "did you mean 'model_name'",
    "base_model": "did you mean 'model_name'",
    "run_name": "did you mean 'wandb_name'",
    "report_to": "did you mean 'wandb_project'",
    "max-grad-norm": "did you mean 'grad_clip_norm'",
    "R": "did you mean 'lora_rank'",
    "eval_strategy": "did you mean 'eval_every'",
    "generation_batch_size": "did you mean 'groups_per_batch'",
    "steps_per_generation": "did you mean 'num_substeps'",
    "grpo": "advantage_normalization=std",
    "bf16": "dtype=bfloat16",
    "gradient_accumulation_steps": "fits into memory",
    "resume_from_checkpoint": "behavior_if_log_dir_exists=resume",
    "lora_alpha": "lora_rank",
    "use_vllm": "sampler=vllm",
    "epsilon": "loss_fn=ppo",
    "max_prompt_length": "max_tokens",
    "save_total_limit": "rolling_save_every",
    "adapter": "lora_rank",
    "reward_funcs": "check_answer",
    "flash_attention": "the engine chooses its kernels",
    "hub_model_id": "tinker_cookbook.weights",
}

# Settings of these libraries that people set in their own files.
LIBRARIES = {
    "TRL": """
        output_dir model_name_or_path num_train_epochs per_device_train_batch_size
        per_device_eval_batch_size gradient_accumulation_steps lr_scheduler_type warmup_ratio
        max_grad_norm assistant_only_loss completion_only_loss num_generations
        generation_batch_size max_completion_length max_prompt_length num_iterations
        steps_per_generation beta epsilon epsilon_high delta loss_type scale_rewards use_vllm
        vllm_mode vllm_gpu_memory_utilization reward_weights reward_funcs
        mask_truncated_completions log_completions sync_ref_model importance_sampling_level
        use_liger_kernel dataset_text_field packing padding_free eos_token neftune_noise_alpha
        dataset_name dataset_num_proc dataloader_num_workers precompute_ref_log_probs ref_model
        label_smoothing rpo_alpha truncation_mode push_to_hub hub_model_id load_best_model_at_end
        metric_for_best_model logging_strategy logging_steps save_strategy save_steps
        save_total_limit eval_strategy eval_steps eval_on_start torch_compile attn_implementation
        bf16 fp16 data_seed deepspeed fsdp optim adam_epsilon run_name report_to logging_dir
        gradient_checkpointing lora_r lora_alpha lora_dropout lora_target_modules use_peft
        load_in_4bit resume_from_checkpoint disable_dropout model_init_kwargs trust_remote_code
        torch_dtype""",
    "axolotl": """
        base_model sequence_len sample_packing micro_batch_size optimizer lr_scheduler
        train_on_inputs adapter lora_target_linear val_set_size dataset_prepared_path datasets
        chat_template evals_per_epoch saves_per_epoch tf32 load_in_8bit flash_attention
        wandb_entity wandb_run_id special_tokens auto_resume_from_checkpoints group_by_length
        fsdp_config rl rl_beta pad_to_sequence_len lora_model_dir roles_to_train train_on_eos""",
    "LLaMA-Factory": """
        adapter_name_or_path stage do_train finetuning_type lora_target dataset_dir template
        cutoff_len max_samples overwrite_cache preprocessing_num_workers plot_loss
        overwrite_output_dir save_only_model ddp_timeout val_size pref_beta pref_loss
        quantization_bit flash_attn mask_history train_on_prompt neat_packing use_unsloth
        enable_liger_kernel loraplus_lr_ratio use_dora use_rslora infer_backend export_dir""",
}


def names_of(main: object) -> list[str]:
    return [key.name for key in keys_of(main.CLIConfig)]  # type: ignore[attr-defined]


def test_names_of_other_libraries():
    from recipes import rl_basic

    keys = names_of(rl_basic)
    wrong = {name: hint_for(name, keys) for name, said in ANSWERS.items()
             if said not in hint_for(name, keys)}  # fmt: skip
    assert not wrong


def test_every_setting_of_trl_axolotl_and_llama_factory_is_answered():
    """By at least one of the three programs that replace these libraries, for each name."""
    from recipes import rl_basic, sl_basic
    from recipes.preference.dpo import train as dpo

    programs = [names_of(main) for main in (sl_basic, rl_basic, dpo)]
    page = (Path(__file__).parents[3] / "docs/from-trl.md").read_text("utf-8")
    first = re.findall(r"^\| (`[^|]*) \|", page.partition("## Arguments")[2], re.MULTILINE)
    names = [name for cell in first for name in re.findall(r"`(\w+)", cell)]
    assert len(names) > 25
    for text in LIBRARIES.values():
        names += text.split()
    unanswered = [
        name for name in names if not any(name in keys or hint_for(name, keys) for keys in programs)
    ]
    assert not unanswered
