"""Names that exist because code written for the official tinker-cookbook imports them.

They are thin functions over the core, which imports nothing from here. Code finds them at their
official paths: a module of the core with ``__getattr__ = official_names(__name__)`` looks up names
in ``NAMES``, and a module without a file is looked up in ``MODULES`` (``utils.imports``).
"""

from __future__ import annotations

_CORE = "tinker_cookbook"

_RENDERERS = """
    ReasoningStreamingParser StreamingParser classify_parse_failure detect_unterminated_tool_block
    parse_content_blocks parse_response_for_stop_token parse_think_blocks
    tokens_weights_from_strings_weights"""

_PLACES = {
    "checkpoint_utils": {
        "checkpoint_manager": "CheckpointManager",
        "renderer_names": """
            add_renderer_name_to_user_metadata check_renderer_name_for_checkpoint
            check_renderer_name_for_checkpoint_async get_renderer_name_from_checkpoint
            resolve_renderer_name_from_checkpoint_or_default
            resolve_renderer_name_from_checkpoint_or_default_async""",
    },
    "distillation.sdft": {
        "sdft": """
            build_reverse_kl_datums build_topk_distillation_datums compute_sdft_advantages""",
    },
    "distillation.train_on_policy": {
        "distillation": """
            do_sync_training do_train_step_and_get_sampling_client incorporate_kl_penalty
            prepare_minibatch""",
    },
    "eval": {"stores.eval_store": "EvalStore RunMetadata"},
    "eval.benchmarks.choices": {
        "benchmark_envs": """
            CEvalMessageEnv GPQAMessageEnv MMLUProMessageEnv MMLUReduxMessageEnv
            SuperGPQAMessageEnv""",
    },
    "eval.benchmarks.instructions": {"benchmark_envs": "IFBenchEnv IFEvalMessageEnv"},
    "eval.benchmarks.mathematics": {
        "benchmark_envs": "AIMEMessageEnv GSM8KMessageEnv MATH500MessageEnv"
    },
    "eval.benchmarks.programs": {"benchmark_envs": "MBPPMessageEnv"},
    "hyperparam_utils": {
        "hyperparam_utils": """
            get_full_finetune_lr_multiplier get_full_finetune_param_count get_lora_lr_multiplier
            get_lora_lr_over_full_finetune_lr""",
    },
    "preference.train_dpo": {"preference": "compute_dpo_loss create_dpo_clients do_update"},
    "renderers": {"renderers": _RENDERERS},
    "renderers.base": {"renderers": _RENDERERS},
    "rl.data_processing": {"rl_flat_observations": "FlatOb FlatObElem ProvenanceSpan"},
    "rl.metrics": {
        "rl_metrics": """
            compute_post_kl compute_sampling_client_metrics incorporate_kl_penalty
            score_sequences""",
    },
    "rl.rollouts": {
        "rl_rollouts": "RolloutErrorCounter do_group_rollout_and_filter_constant_reward"
    },
    "rl.train": {
        "rl_loops": """
            DISCARDED_WORK_LOG_INTERVAL_SECONDS DiscardedWorkLog count_discarded_rollout
            do_async_training do_sync_training do_sync_training_with_stream_minibatch
            drop_constant_reward_group""",
        "rl_steps": """
            SamplingClientReuse WrappedTrajectoryGroup _remove_mask
            compute_full_batch_metrics_and_get_sampling_client
            do_train_step_and_get_sampling_client do_train_step_streaming_and_get_sampling_client
            gather_with_progress prepare_minibatch print_group rollout_usage
            run_evaluations_parallel run_single_evaluation save_checkpoint_and_get_sampling_client
            train_step training_usage""",
    },
    "stores": {
        "stores._incremental": "IncrementalReader",
        "stores.eval_store": "EvalStore RunMetadata",
        "stores.registry": "RunInfo RunRegistry",
        "stores.storage": """
            AsyncStorage FsspecStorage LocalStorage Storage StorageStat storage_from_uri
            storage_join""",
        "stores.training_store": "TrainingRunStore",
    },
    "utils.cost_estimation": {"cost_tracker": "CostTracker"},
    "utils.logtree": {
        "logtree": """
            Theme details flush_trace header jinja_context render_with_jinja scope_details
            scope_header_decorator table_from_dict table_from_dict_of_lists
            write_html_with_default_style""",
    },
}

_FILES = {
    "chat_app.tinker_chat_cli": "official.tinker_chat_cli",
    "eval.benchmarks._common": "official.benchmark_common",
    "eval.benchmarks._runner": "eval.benchmarks",
    "eval.benchmarks._types": "eval.run.types",
    "eval.benchmarks.aime": "eval.benchmarks.mathematics",
    "eval.benchmarks.ceval": "eval.benchmarks.choices",
    "eval.benchmarks.gpqa": "eval.benchmarks.choices",
    "eval.benchmarks.gsm8k": "eval.benchmarks.mathematics",
    "eval.benchmarks.ifbench": "eval.benchmarks.instructions",
    "eval.benchmarks.ifeval": "eval.benchmarks.instructions",
    "eval.benchmarks.math500": "eval.benchmarks.mathematics",
    "eval.benchmarks.mbpp": "eval.benchmarks.programs",
    "eval.benchmarks.mmlu_pro": "eval.benchmarks.choices",
    "eval.benchmarks.mmlu_redux": "eval.benchmarks.choices",
    "eval.benchmarks.supergpqa": "eval.benchmarks.choices",
    "eval.inspect_evaluators": "eval.inspect_bridge.evaluators",
    "eval.inspect_utils": "eval.inspect_bridge.model",
    "preference.train_dpo_cli": "official.train_dpo_cli",
    "recipes.distillation.sdft": "recipes.sdft.train",
    "recipes.preference.train": "recipes.preference.dpo.train",
    "recipes.tool_use.search": "recipes.search_tool",
    "recipes.twenty_questions": "recipes.multiplayer_rl.twenty_questions",
    "rl.interleaved": "official.rl_interleaved",
    "rl.message_env": "rl.envs.message_env",
    "rl.metric_util": "official.rl_metric_util",
    "rl.envs.play_w_env": "official.rl_play_w_env",  # its former path
    "rl.play_w_env": "official.rl_play_w_env",
    "rl.preference_envs": "rl.envs.preference_envs",
    "rl.problem_env": "rl.envs.problem_env",
    "rl.rollout_limits": "rl.rollouts.limits",
    "rl.rollout_logging": "official.rl_rollout_logging",
    "rl.rollout_presets": "rl.rollouts.presets",
    "rl.rollout_runner": "rl.rollouts.episode",
    "rl.rollout_strategy": "rl.rollouts.strategy",
    "scripts.": "official.scripts.",
    "stores.": "official.stores.",
    "supervised.train_cli": "supervised.train",
    "supervised.viz_sft_dataset": "official.viz_sft_dataset",
    "utils.code_state": "run.code_state",
    "utils.deprecation": "official.deprecation",
    "utils.file_utils": "official.misc_utils",
    "utils.format_colorized": "utils.terminal",
    "utils.git_rev": "official.misc_utils",
    "utils.logtree_formatters": "utils.logtree.formatters",
    "utils.lr_scheduling": "training.lr_scheduling",
    "utils.misc_utils": "official.misc_utils",
    "utils.ml_log": "run.ml_log",
    "utils.session_naming": "official.misc_utils",
}

NAMES: dict[str, dict[str, str]] = {
    f"{_CORE}.{module}": {
        name: f"{__name__}.{place}" for place, names in places.items() for name in names.split()
    }
    for module, places in _PLACES.items()
}
"""Official module -> name -> module that defines it."""

MODULES = {f"{_CORE}.{path}": f"{_CORE}.{file}" for path, file in _FILES.items()}
"""Official path without a file -> module; ends with a dot: all modules of the package."""
