"""Keys of the original cookbook's programs (0.6.1): who types them here gets what they mean there.

The list is committed, so that a key cannot be lost; what is left out stands with its reason.
"""

from __future__ import annotations

import importlib
import inspect

import chz
import pytest

from recipes import rl_basic, rl_loop, sl_basic
from recipes.distillation import on_policy_multi_teacher
from recipes.math_rl import train as math_rl
from recipes.preference.rlhf import settings as rlhf
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.command_line.entrypoint import parse_arguments
from tinker_cookbook.utils.command_line.keys import aliases_of, keys_of

KEYS = {
    "recipes.sl_loop": """
        base_url log_path model_name batch_size learning_rate max_length train_on_what
        lora_rank save_every ttl_seconds max_steps wandb_project wandb_name session_name
    """,
    "recipes.rl_loop": """
        base_url log_path model_name batch_size group_size learning_rate lora_rank
        save_every max_tokens loss_fn ttl_seconds max_steps wandb_project wandb_name
        session_name
    """,
    "recipes.math_rl.train": """
        model_name lora_rank renderer_name load_checkpoint_path env seed group_size
        groups_per_batch learning_rate max_tokens temperature kl_penalty_coef num_substeps
        log_path wandb_project wandb_name session_name compute_post_kl eval_every save_every
        base_url behavior_if_log_dir_exists max_steps_off_policy stream_minibatch_config
        loss_fn loss_fn_config max_steps
    """,
    "recipes.search_tool.train": """
        model_name lora_rank renderer_name learning_rate batch_size seed max_tokens eval_every
        group_size max_turns format_coef max_trajectory_tokens chroma_host chroma_port
        chroma_collection_name n_results embedding_model_name embedding_dim stream_minibatch
        num_minibatches log_path wandb_project wandb_name session_name
        behavior_if_log_dir_exists max_steps
    """,
    "recipes.search_tool.offline_eval": """
        max_eval_samples seed split base_model renderer_name tinker_checkpoint_url max_tokens
        max_trajectory_tokens
    """,
    "recipes.multiplayer_rl.guess_number.train": """
        model_name renderer_name group_size batch_size learning_rate max_tokens eval_every
        save_every wandb_project wandb_name session_name log_path behavior_if_log_dir_exists
        max_steps
    """,
    "recipes.multiplayer_rl.text_arena.train": """
        model_name renderer_name game_name test_opponent batch_size num_train_datapoints
        num_test_datapoints learning_rate max_tokens eval_every save_every wandb_project
        wandb_name session_name log_path behavior_if_log_dir_exists max_steps
    """,
    "recipes.multiplayer_rl.twenty_questions.train": """
        model_name renderer_name group_size num_epochs batch_size learning_rate max_tokens
        eval_every save_every wandb_project wandb_name session_name log_path
        behavior_if_log_dir_exists max_steps
    """,
    "recipes.chat_sl.train": """
        log_path model_name load_checkpoint_path dataset learning_rate lr_schedule num_epochs
        lora_rank base_url save_every eval_every infrequent_eval_every inline_evals
        renderer_name train_on_what max_length batch_size wandb_project wandb_name
        session_name behavior_if_log_dir_exists max_steps rolling_save_every
        rolling_ttl_seconds
    """,
    "recipes.preference.dpo.train": """
        model_name dataset load_checkpoint_path renderer_name learning_rate lr_schedule
        dpo_beta max_length batch_size log_path wandb_project wandb_name session_name
        base_url reference_model_name behavior_if_log_dir_exists max_steps
    """,
    "recipes.preference.shorter.train": """
        model_name renderer_name batch_size group_size learning_rate max_tokens eval_every
        log_path wandb_project wandb_name session_name behavior_if_log_dir_exists max_steps
    """,
    "recipes.preference.rlhf.rlhf_pipeline": """
        base_model short_name run_sft run_rm run_rl wandb_project wandb_name session_name
        lora_rank max_length batch_size sft_learning_rate rm_learning_rate rl_learning_rate
        rl_max_tokens rl_group_size save_every eval_every num_groups_to_log max_steps
    """,
    "recipes.prompt_distillation.create_data": """
        output_file
    """,
    "recipes.prompt_distillation.train": """
        file_path log_path model_name load_checkpoint_path learning_rate lr_schedule
        num_epochs lora_rank base_url save_every eval_every renderer_name train_on_what
        max_length batch_size wandb_project wandb_name session_name
        behavior_if_log_dir_exists max_steps
    """,
    "recipes.distillation.on_policy_distillation": """
        model_name lora_rank renderer_name load_checkpoint_path teacher_model
        teacher_checkpoint dataset group_size groups_per_batch learning_rate max_tokens
        temperature kl_penalty_coef kl_discount_factor num_substeps loss_fn loss_fn_config
        log_path wandb_project wandb_name session_name compute_post_kl eval_every save_every
        base_url behavior_if_log_dir_exists max_steps
    """,
    "recipes.distillation.on_policy_multi_teacher": """
        model_name lora_rank renderer_name load_checkpoint_path deepmath_teacher_model
        deepmath_teacher_checkpoint tulu3_teacher_model tulu3_teacher_checkpoint
        deepmath_groups_per_batch tulu3_groups_per_batch group_size learning_rate max_tokens
        temperature kl_penalty_coef kl_discount_factor num_substeps loss_fn loss_fn_config
        log_path wandb_project wandb_name session_name compute_post_kl eval_every save_every
        base_url behavior_if_log_dir_exists max_steps
    """,
    "recipes.distillation.on_policy_distillation_harbor_multi_turn": """
        model_name lora_rank renderer_name load_checkpoint_path teacher_model teacher_checkpoint
        task_name sandbox_factory max_turns sandbox_timeout command_timeout max_trajectory_tokens
        group_size groups_per_batch learning_rate max_tokens temperature kl_penalty_coef
        kl_discount_factor num_substeps loss_fn loss_fn_config log_path wandb_project wandb_name
        session_name eval_every save_every base_url max_steps behavior_if_log_dir_exists
    """,
    "recipes.true_thinking_score.analyze": """
        model_name renderer_name dataset n_problems max_tokens concurrency log_path seed
    """,
    "recipes.sdft.benchmark": """
        model_name lora_rank renderer_name dataset data_dir phase checkpoint_path learning_rate
        groups_per_batch max_tokens max_steps eval_every save_every sft_learning_rate
        sft_batch_size sft_max_steps log_root wandb_project session_name base_url
        behavior_if_log_dir_exists
    """,
    "recipes.sdft.run_continual_learning": """
        model_name data_dir lora_rank batch_size max_tokens methods learning_rates stages topk
        thinking_format log_root wandb_project session_name base_url dry_run
    """,
    "recipes.distillation.off_policy_reasoning": """
        model_name lora_rank renderer_name load_checkpoint_path batch_size learning_rate
        lr_schedule num_epochs max_length buffer_size max_prompts log_path wandb_project
        wandb_name session_name eval_every save_every base_url behavior_if_log_dir_exists
        max_steps
    """,
    "recipes.sdft.train": """
        model_name lora_rank renderer_name load_checkpoint_path dataset sciknoweval_domain
        toolalpaca_data_path group_size groups_per_batch learning_rate max_tokens
        temperature topk reverse teacher_sync_every max_context_length num_substeps log_path
        wandb_project wandb_name session_name eval_every save_every base_url max_steps
        behavior_if_log_dir_exists
    """,
    "recipes.sl_basic": """
        log_path model_name recipe_name load_checkpoint_path renderer_name dataset_builder
        learning_rate lr_schedule num_epochs lora_rank base_url evaluator_builders
        infrequent_evaluator_builders save_every save_every_tokens save_every_seconds
        eval_every infrequent_eval_every ttl_seconds rolling_save_every rolling_ttl_seconds
        async_periodic_saves adam_beta1 adam_beta2 adam_eps wandb_project wandb_name
        session_name enable_trace span_chart_every max_steps submit_ahead
    """,
    "recipes.rl_basic": """
        learning_rate dataset_builder model_name recipe_name max_tokens log_path eval_every
        save_every evaluator_builders load_checkpoint_path renderer_name wandb_project
        wandb_name session_name kl_penalty_coef kl_discount_factor kl_reference_config
        loss_fn loss_fn_config num_substeps lora_rank temperature compute_post_kl
        remove_constant_reward_groups rollout_error_tolerance termination enable_trace
        span_chart_every async_config stream_minibatch_config base_url ttl_seconds
        rolling_save_every rolling_ttl_seconds num_groups_to_log rollout_json_export
        num_epochs max_steps
    """,
    "tinker_cookbook.supervised.train": """
        log_path model_name recipe_name load_checkpoint_path renderer_name dataset_builder
        learning_rate lr_schedule num_epochs lora_rank base_url evaluator_builders
        infrequent_evaluator_builders save_every save_every_tokens save_every_seconds
        eval_every infrequent_eval_every ttl_seconds rolling_save_every rolling_ttl_seconds
        async_periodic_saves adam_beta1 adam_beta2 adam_eps wandb_project wandb_name
        session_name enable_trace span_chart_every max_steps submit_ahead
    """,
    "tinker_cookbook.rl.train": """
        learning_rate dataset_builder model_name recipe_name max_tokens log_path eval_every
        save_every evaluator_builders load_checkpoint_path renderer_name wandb_project
        wandb_name session_name kl_penalty_coef kl_discount_factor kl_reference_config
        loss_fn loss_fn_config num_substeps lora_rank temperature compute_post_kl
        remove_constant_reward_groups rollout_error_tolerance termination enable_trace
        span_chart_every async_config stream_minibatch_config base_url ttl_seconds
        rolling_save_every rolling_ttl_seconds num_groups_to_log rollout_json_export
        num_epochs max_steps
    """,
    "tinker_cookbook.preference.train_dpo": """
        log_path model_name recipe_name dataset_builder load_checkpoint_path renderer_name
        learning_rate lr_schedule num_epochs dpo_beta lora_rank num_replicas base_url
        evaluator_builders infrequent_evaluator_builders save_every eval_every
        infrequent_eval_every ttl_seconds rolling_save_every rolling_ttl_seconds adam_beta1
        adam_beta2 adam_eps wandb_project wandb_name session_name enable_trace
        span_chart_every reference_model_name max_steps
    """,
    "tinker_cookbook.distillation.train_on_policy": """
        learning_rate dataset_configs model_name recipe_name renderer_name max_tokens
        temperature compute_post_kl evaluator_builders lora_rank kl_penalty_coef
        kl_discount_factor loss_fn loss_fn_config num_substeps wandb_project wandb_name
        session_name log_path base_url enable_trace span_chart_every eval_every save_every
        load_checkpoint_path max_steps
    """,
    "tinker_cookbook.distillation.train_off_policy": """
        learning_rate dataset_configs model_name recipe_name renderer_name lora_rank
        n_teacher_targets teacher_concurrency batch_size save_every eval_every max_steps
        load_checkpoint_path log_path wandb_project wandb_name session_name base_url
        ttl_seconds enable_trace evaluator_builders
    """,
    "tinker_cookbook.distillation.sdft": """
        model_name recipe_name renderer_name lora_rank base_url learning_rate max_tokens
        temperature loss_fn topk reverse demo_template system_prompt teacher_sync_every
        max_context_length evaluator_builders eval_every save_every num_substeps log_path
        wandb_project wandb_name session_name load_checkpoint_path max_steps enable_trace
        span_chart_every
    """,
}

# Settings of the original's self-distillation that this loop does not have.
MISSING = {
    ("tinker_cookbook.distillation.sdft", "loss_fn"),
}
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


@pytest.mark.parametrize("program", KEYS)
def test_every_key_is_there(program):
    there = names_of(program)
    excepted = {key for name, key in MISSING if name == program}
    assert [key for key in KEYS[program].split() if key not in there | excepted] == []


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
    cli = parse_arguments(
        on_policy_multi_teacher.CLIConfig, ["deepmath_teacher_model=a", "first.dataset=example"]
    )
    with pytest.raises(ConfigurationError, match=r"means first\.dataset=deepmath"):
        cli.part("first", "deepmath")


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
