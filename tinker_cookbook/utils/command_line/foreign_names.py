"""Names of settings in other libraries, and what they are here.

An unknown key is answered from these two tables before the most similar key is suggested.
"""

from __future__ import annotations

from collections.abc import Iterable

_LOG_PATH = ("log_path", "log_dir", "output_file")
_BATCH = ("batch_size", "groups_per_batch")
_STEPS = ("max_steps", "num_steps", "num_batches")
_DATA = ("dataset_path", "dataset", "file_path", "input_file", "dataset_builder")
_TRAINED = ("train_on_what",)
_GROUP = ("group_size", "samples_per_query", "rl_group_size")
_TOKENS = ("max_tokens", "rl_max_tokens", "answer_max_tokens")

# Names in TRL, axolotl, LLaMA-Factory and others, and the keys that they mean here: the first one
# that the program has.
_SYNONYMS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("lr", "learningrate", "peak_lr", "max_lr"): (
        "learning_rate",
        "sft_learning_rate",
    ),
    ("output_dir", "out_dir", "output", "out", "save_dir", "logging_dir", "logdir", "run_dir"): (
        _LOG_PATH
    ),
    ("log_dir", "results_dir", "checkpoint_dir"): _LOG_PATH,
    ("epochs", "n_epochs", "num_train_epochs", "epoch"): ("num_epochs",),
    ("batch", "batch_size", "bs", "per_device_train_batch_size", "train_batch_size"): _BATCH,
    ("per_device_batch_size", "global_batch_size", "groups_per_batch"): _BATCH,
    ("steps", "max_steps", "num_steps", "n_steps", "total_steps", "max_train_steps"): _STEPS,
    ("num_train_steps", "n_batches", "num_batches", "max_iters", "iters"): _STEPS,
    ("warmup", "num_warmup_steps", "lr_warmup_steps", "warmup_iters"): ("warmup_steps",),
    ("lr_scheduler_type", "lr_scheduler", "scheduler", "schedule"): ("lr_schedule",),
    ("adam_epsilon", "eps", "adam_epsilon_value"): ("adam_eps",),
    ("beta1", "adam_b1"): ("adam_beta1",),
    ("beta2", "adam_b2"): ("adam_beta2",),
    ("wd",): ("weight_decay",),
    ("max_grad_norm", "clip_grad_norm", "gradient_clip", "grad_clip", "clip_grad"): (
        "grad_clip_norm",
    ),
    ("rank", "r", "lora_r", "lora_dim"): ("lora_rank",),
    ("max_new_tokens", "max_completion_length", "max_response_length", "response_length"): _TOKENS,
    ("max_output_tokens", "new_tokens"): _TOKENS,
    ("num_generations", "n_samples", "num_samples", "samples_per_prompt", "n"): _GROUP,
    ("num_generations_per_prompt", "num_return_sequences", "rollouts", "g"): _GROUP,
    ("beta",): ("dpo_beta", "kl_penalty_coef"),
    ("kl_coef", "kl_beta", "kl_coeff", "init_kl_coef", "kl"): ("kl_penalty_coef",),
    ("model", "base_model", "model_path", "model_name_or_path", "model_id", "pretrained"): (
        "model_name",
        "base_model",
    ),
    ("policy_model", "student", "student_model", "checkpoint_model"): ("model_name",),
    ("teacher", "teacher_model_name", "teacher_name"): ("teacher_model", "teacher_path"),
    ("ref_model", "reference_model", "ref_model_name"): (
        "reference_model_name",
        "kl_reference_model",
    ),
    ("dataset", "data", "data_path", "train_file", "train_data", "training_file"): _DATA,
    ("dataset_name", "dataset_file", "train_path", "data_file", "file"): _DATA,
    ("eval_file", "validation_file", "test_file", "eval_dataset", "val_path"): ("test_path",),
    ("eval_size", "val_size", "validation_split", "val_set_size"): ("test_size", "test_fraction"),
    ("run_name", "experiment_name", "exp_name", "name"): ("wandb_name", "session_name"),
    ("report_to", "wandb", "project", "wandb_entity", "logger", "use_wandb"): ("wandb_project",),
    ("max_seq_length", "max_seq_len", "max_len", "seq_len", "cutoff_len", "block_size"): (
        "max_length",
    ),
    ("assistant_only_loss", "completion_only_loss", "train_on_inputs", "mask_history"): _TRAINED,
    ("group_size",): _GROUP,
    ("context_length", "model_max_length", "sequence_len"): ("max_length",),
    ("eval_steps", "eval_interval", "evaluation_steps", "eval_freq", "eval_strategy"): (
        "eval_every",
    ),
    ("save_steps", "save_interval", "checkpoint_every", "save_freq"): ("save_every",),
    ("random_seed", "data_seed"): ("seed",),
    ("temp", "sampling_temperature"): ("temperature",),
    ("renderer", "chat_template", "template", "prompt_template"): ("renderer_name",),
    ("environment", "env_name", "task", "task_name"): ("env", "dataset"),
    ("checkpoint", "checkpoint_path", "load_path", "init_from", "adapter_path"): (
        "load_checkpoint_path",
        "model_path",
    ),
    ("resume_from", "load_checkpoint", "adapter_name_or_path"): ("load_checkpoint_path",),
    ("url", "server", "api_base", "host"): ("base_url", "server"),
    ("loss", "algorithm", "algo", "loss_type"): ("loss_fn", "dpo_loss"),
    ("reward_scaling", "scale_rewards", "norm_adv", "normalize_advantages"): (
        "advantage_normalization",
    ),
    ("generation_batch_size",): ("groups_per_batch",),
    ("num_iterations", "steps_per_generation", "ppo_epochs"): ("num_substeps",),
    ("rl_beta", "pref_beta"): ("dpo_beta",),
    ("pref_loss", "rl"): ("dpo_loss",),
    ("datasets", "dataset_dir", "dataset_text_field"): _DATA,
    ("roles_to_train", "train_on_prompt", "train_on_eos"): _TRAINED,
    ("lora_model_dir",): ("load_checkpoint_path",),
    ("val_size",): ("test_size",),
    ("evals_per_epoch",): ("eval_every",),
    ("saves_per_epoch", "save_strategy"): ("save_every",),
    ("sync_ref_model",): ("kl_reference_model",),
    ("wandb_run_id",): ("wandb_name",),
    ("metric_for_best_model",): ("best_metric",),
    ("infer_backend",): ("sampler",),
}

# Names that mean a value of one of our keys, or no key at all: names, a key that the program must
# have for the hint to be true, hint.
_HINTS: dict[tuple[str, ...], tuple[str, str]] = {
    ("grpo", "use_grpo", "dapo", "dr_grpo", "rloo"): (
        "advantage_normalization",
        "GRPO is loss_fn=importance_sampling or ppo with advantage_normalization=std (center, the "
        "default, is Dr. GRPO; leave_one_out is RLOO)",
    ),
    ("bf16", "bfloat16", "use_bf16"): ("dtype", "set dtype=bfloat16"),
    ("fp16", "float16", "mixed_precision", "precision", "torch_dtype", "half"): (
        "dtype",
        "set dtype=bfloat16 or dtype=float32",
    ),
    ("gpu", "cuda", "use_cuda", "cpu", "use_cpu", "no_cuda"): (
        "device",
        "set device=auto, cuda, mps or cpu",
    ),
    ("gradient_accumulation_steps", "accumulation_steps", "grad_accum"): (
        "learning_rate",
        "a batch is split so that it fits into memory without a setting; batch_size or "
        "groups_per_batch is what one optimizer step trains on",
    ),
    ("micro_batch_size", "mini_batch_size", "per_device_eval_batch_size"): (
        "learning_rate",
        "a batch is split so that it fits into memory without a setting; batch_size or "
        "groups_per_batch is what one optimizer step trains on",
    ),
    ("gradient_checkpointing", "use_gradient_checkpointing"): (
        "learning_rate",
        "activations are recomputed where memory is short, without a setting",
    ),
    ("use_vllm", "vllm_mode", "use_vllm_server"): (
        "sampler",
        "the engine samples too; sampler=vllm uses vLLM on a GPU",
    ),
    ("epsilon", "epsilon_high", "clip_range", "cliprange", "clip_ratio"): (
        "loss_fn_config",
        "clipping belongs to a loss: loss_fn=ppo with "
        "loss_fn_config.clip_low_threshold=0.8 loss_fn_config.clip_high_threshold=1.2",
    ),
    ("max_prompt_length",): (
        "max_tokens",
        "prompts are never cut; max_tokens is the limit of a response",
    ),
    ("save_total_limit",): (
        "ttl_seconds",
        "periodic checkpoints expire after ttl_seconds; rolling_save_every keeps the newest only",
    ),
    ("adapter", "use_lora", "use_peft", "finetuning_type"): (
        "lora_rank",
        "training is always by LoRA; lora_rank is the setting",
    ),
    ("warmup_ratio",): ("warmup_steps", "set warmup_steps to a number of steps"),
    ("lora_alpha", "alpha", "lora_dropout"): (
        "lora_rank",
        "lora_alpha is fixed at 32 and there is no dropout, as on the Tinker API; lora_rank is "
        "the setting",
    ),
    ("target_modules", "lora_target_modules"): (
        "train_mlp",
        "set train_attn, train_mlp and train_unembed to True or False",
    ),
    ("packing", "pack", "sample_packing"): (
        "learning_rate",
        "sequences are packed without a setting",
    ),
    ("logging_steps", "log_every", "log_interval"): (
        "log_path",
        "every step is logged, to metrics.jsonl in log_path",
    ),
    ("resume", "resume_from_checkpoint", "continue"): (
        "behavior_if_log_dir_exists",
        "set behavior_if_log_dir_exists=resume and the log_path of the run",
    ),
    ("overwrite", "overwrite_output_dir", "force"): (
        "behavior_if_log_dir_exists",
        "set behavior_if_log_dir_exists=delete",
    ),
    ("optim", "optimizer"): ("adam_beta1", "the optimizer is AdamW; its settings are adam_…"),
    ("num_gpus", "nproc_per_node", "deepspeed", "fsdp"): (
        "shard_base",
        "start the command by torchrun --nproc-per-node N -m recipes.NAME to train on N GPUs; "
        "shard_base=true divides a base model that fits no single one",
    ),
    ("load_in_4bit", "load_in_8bit", "quantization_bit"): (
        "base_dtype",
        "set base_dtype=nf4 or base_dtype=int8",
    ),
    ("reward_funcs", "reward_function", "reward_fn", "reward_weights", "custom_reward"): (
        "group_size",
        "a reward is the method check_answer of an environment, which tinker_cookbook.rl.run or a "
        "dataset builder takes",
    ),
    ("mask_truncated_completions", "overlong_filter"): (
        "group_size",
        "truncated responses are graded as they are; max_tokens is their limit",
    ),
    ("importance_sampling_level", "delta"): (
        "loss_fn_config",
        "ratios are for each token; loss_fn and loss_fn_config choose how they are clipped",
    ),
    ("log_completions",): (
        "log_path",
        "samples are in log_path: iteration_NNNNNN/train.html, or samples.jsonl",
    ),
    ("vllm_gpu_memory_utilization", "vllm_max_model_length"): (
        "sampler",
        "the settings of vLLM are those that --help lists next to sampler",
    ),
    ("padding_free", "neat_packing", "group_by_length", "pad_to_sequence_len"): (
        "learning_rate",
        "sequences are packed without padding and without a setting",
    ),
    (
        "flash_attn",
        "flash_attention",
        "attn_implementation",
        "torch_compile",
        "use_liger_kernel",
        "enable_liger_kernel",
        "use_unsloth",
        "tf32",
    ): ("device", "the engine chooses its kernels by the device, without a setting"),
    ("neftune_noise_alpha", "use_dora", "use_rslora", "loraplus_lr_ratio", "disable_dropout"): (
        "lora_rank",
        "adapters are plain LoRA, as on the Tinker API: no dropout, noise or variants",
    ),
    ("dataset_num_proc", "dataloader_num_workers", "preprocessing_num_workers"): (
        "learning_rate",
        "rows are tokenized while the step before is trained, without a setting",
    ),
    ("dataset_prepared_path", "overwrite_cache"): (
        "learning_rate",
        "rows are tokenized when they are needed; there is no prepared copy",
    ),
    ("eos_token", "special_tokens", "pad_token"): (
        "renderer_name",
        "the chat format (renderer_name) has its special tokens and its stop tokens",
    ),
    ("precompute_ref_log_probs",): (
        "dpo_beta",
        "the reference model is the base model without the adapter, so no copy is loaded",
    ),
    ("rpo_alpha", "label_smoothing", "ld_alpha"): ("dpo_loss", "dpo_loss chooses the loss"),
    ("truncation_mode",): (
        "max_length",
        "sequences longer than max_length are cut at the end; the data report counts them",
    ),
    ("push_to_hub", "hub_model_id", "export_dir", "save_only_model"): (
        "log_path",
        "the checkpoint is exported after training: python -m tinker_cookbook.weights export, "
        "merge or publish",
    ),
    ("max_samples", "max_train_samples"): (
        "max_steps",
        "max_steps limits the training; give a shorter file to train on fewer rows",
    ),
    ("load_best_model_at_end", "early_stopping_patience"): (
        "save_every",
        "checkpoints and the metrics of their steps are in log_path; best_metric, where a recipe "
        "has it, keeps the best one",
    ),
    ("logging_strategy", "plot_loss"): (
        "log_path",
        "every step is logged to metrics.jsonl; python -m tinker_cookbook.plot draws it",
    ),
    ("eval_on_start",): ("eval_every", "the first evaluation is always before the first step"),
    ("trust_remote_code", "model_init_kwargs"): (
        "model_name",
        "models are loaded without code of their repository",
    ),
    ("stage", "do_train", "do_eval"): (
        "model_name",
        "the program is the stage: recipes.sl_basic, recipes.preference.dpo.train or "
        "recipes.rl_basic",
    ),
    ("fsdp_config", "ddp_timeout", "accelerate"): (
        "shard_base",
        "start the command by torchrun --nproc-per-node N; there is no file of settings",
    ),
    ("lora_target", "lora_target_linear"): (
        "train_mlp",
        "set train_attn, train_mlp and train_unembed to True or False",
    ),
    ("auto_resume_from_checkpoints",): (
        "behavior_if_log_dir_exists",
        "set behavior_if_log_dir_exists=resume and the log_path of the run",
    ),
}

_KEYS_OF_NAME = {name: keys for names, keys in _SYNONYMS.items() for name in names}
_HINT_OF_NAME = {name: hint for names, hint in _HINTS.items() for name in names}


def hint_for(name: str, known: Iterable[str]) -> str:
    """Returns what to use in place of an unknown key, as the end of a sentence, or ``""``.

    Args:
        name: What was typed; case, hyphens and underscores do not matter.
        known: The keys of the program. No other is ever suggested.
    """
    keys = set(known)
    typed = name.lower().replace("-", "_").strip("_")
    # By their last part, since the key may be of a nested object (dataset_builder.group_size). The
    # program's own keys are the shortest, so they replace those of nested objects.
    full = {key.rpartition(".")[2]: key for key in sorted(keys, key=len, reverse=True)}
    for key in _KEYS_OF_NAME.get(typed, ()):
        if key in full:
            return f"; did you mean {full[key]!r}?"
    needed, hint = _HINT_OF_NAME.get(typed, ("", ""))
    return f"; {hint}" if needed in keys else ""
