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
    "report_to": "wandb_project",
}
# Name there: a key that the program must have for the hint to be true, and the hint.
_HINTS = {
    "gradient_accumulation_steps": (
        "learning_rate",
        "a batch is split so that it fits into memory without a setting; batch_size or "
        "groups_per_batch is what one optimizer step trains on",
    ),
    "bf16": ("dtype", "set dtype=bfloat16"),
    "lora_alpha": ("lora_rank", "lora_alpha is fixed at 32, as on the Tinker API; set lora_rank"),
    "resume_from_checkpoint": (
        "behavior_if_log_dir_exists",
        "set behavior_if_log_dir_exists=resume and the log_path of the run",
    ),
    "use_vllm": ("sampler", "the engine samples too; sampler=vllm uses vLLM on a GPU"),
    "reward_funcs": (
        "group_size",
        "a reward is the method check_answer of an environment, which tinker_cookbook.rl.run or a "
        "dataset builder takes",
    ),
}


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
    for key in _KEYS.get(typed, "").split():
        if key in full:
            return f"; did you mean {full[key]!r}?"
    needed, hint = _HINTS.get(typed, ("", ""))
    return f"; {hint}" if needed in keys else ""
