"""Names that other libraries use for our keys, so that a wrong key is answered with the right one.

The names are those of ``transformers.TrainingArguments``, TRL, PEFT, LLaMA-Factory, axolotl, and of
code written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable

_LOG_PATH = ("log_path", "log_dir", "output_file")
_BATCH = ("batch_size", "groups_per_batch")
_STEPS = ("max_steps", "num_steps", "num_batches")
_DATA = ("dataset_path", "dataset", "file_path", "input_file", "dataset_builder")
_GROUP = ("group_size", "samples_per_query", "rl_group_size")
_TOKENS = ("max_tokens", "rl_max_tokens", "answer_max_tokens")

# Each name with the keys that may stand for it. The first that the program has is the right one.
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
    ("context_length", "model_max_length", "sequence_len"): ("max_length",),
    ("eval_steps", "eval_interval", "evaluation_steps", "eval_freq"): ("eval_every",),
    ("save_steps", "save_interval", "checkpoint_every", "save_freq"): ("save_every",),
    ("random_seed", "data_seed"): ("seed",),
    ("temp", "sampling_temperature"): ("temperature",),
    ("renderer", "chat_template", "template", "prompt_template"): ("renderer_name",),
    ("environment", "env_name", "task", "task_name"): ("env", "dataset"),
    ("checkpoint", "checkpoint_path", "load_path", "init_from", "adapter", "adapter_path"): (
        "load_checkpoint_path",
        "model_path",
    ),
    ("resume_from", "load_checkpoint", "adapter_name_or_path"): ("load_checkpoint_path",),
    ("url", "server", "api_base", "host"): ("base_url", "server"),
    ("loss", "algorithm", "algo", "loss_type"): ("loss_fn", "dpo_loss"),
    ("reward_scaling", "scale_rewards", "norm_adv", "normalize_advantages"): (
        "advantage_normalization",
    ),
}

# Names for which the answer is a value of one of our keys, or no key at all: name, key that the
# program must have for the sentence to be true, sentence.
_SENTENCES: dict[tuple[str, ...], tuple[str, str]] = {
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
        "device",
        "the local engine computes on one device",
    ),
    ("load_in_4bit", "load_in_8bit", "quantization_bit"): (
        "dtype",
        "the local engine trains in bfloat16 or float32; set dtype",
    ),
}

_KEYS = {name: keys for names, keys in _SYNONYMS.items() for name in names}
_SAID = {name: answer for names, answer in _SENTENCES.items() for name in names}


def hint_for(name: str, known: Iterable[str]) -> str:
    """What to use in place of a key that does not exist, as the end of a sentence, or ``""``.

    Args:
        name: What was typed; case, hyphens and underscores do not matter.
        known: The keys of the program. No other is ever suggested.
    """
    keys = set(known)
    typed = name.lower().replace("-", "_").strip("_")
    for key in _KEYS.get(typed, ()):
        if key in keys:
            return f"; did you mean {key!r}?"
    needed, sentence = _SAID.get(typed, ("", ""))
    return f"; {sentence}" if needed in keys else ""
