"""The commonest names of settings in TRL and transformers, and what they are here.

Other unknown keys get the most similar key as a suggestion.
"""

from __future__ import annotations

from collections.abc import Iterable

_BATCH = "batch_size groups_per_batch"
# Name there: the keys that it may mean here; the first one that the program has is suggested.
_KEYS = {
    "lr": "learning_rate sft_learning_rate",
    "output_dir": "log_path log_dir output_file",
    "model": "model_name base_model",
    "model_name_or_path": "model_name base_model",
    "dataset": "dataset_path file_path dataset_builder",
    "per_device_train_batch_size": _BATCH,
    "batch_size": _BATCH,
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "max_seq_length": "max_length",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "num_generations": "group_size",
    "group_size": "group_size",  # of a nested object
    "beta": "dpo_beta kl_penalty_coef",
    "max_grad_norm": "grad_clip_norm",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "run_name": "wandb_name",
    "report_to": "trackers",
    "resume_from_checkpoint": "behavior_if_log_dir_exists",
    "bf16": "dtype",
    "use_vllm": "sampler",
    "lora_alpha": "lora_rank",
    "lr_scheduler_type": "lr_schedule",
    "gradient_accumulation_steps": _BATCH,
    "eval_strategy": "eval_every",
    "save_total_limit": "rolling_save_every",
    "assistant_only_loss": "train_on_what",
    "num_iterations": "num_substeps",
    "epsilon": "loss_fn_config",
    "scale_rewards": "advantage_normalization",
}


def hint_for(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'KEY'?"`` for an unknown key, or ``""``.

    Args:
        name: What was typed; case, hyphens and underscores do not matter.
        known: The keys of the program. No other is ever suggested.
    """
    typed = name.lower().replace("-", "_").strip("_")
    # By their last part, since the key may be of a nested object (dataset_builder.group_size). The
    # program's own keys are the shortest, so they replace those of nested objects.
    full = {key.rpartition(".")[2]: key for key in sorted(known, key=len, reverse=True)}
    meant = next((full[key] for key in _KEYS.get(typed, "").split() if key in full), None)
    return f"; did you mean {meant!r}?" if meant else ""
