"""Which keys of a command line belong together in ``--help``, and in which order they stand."""

from __future__ import annotations

from collections.abc import Iterable

from tinker_cookbook.utils.config_keys import Key

TASK, OTHER = "Task", "Other settings"

# Within a group the common keys come first. What is listed nowhere is the program's own: its task.
_GROUPS: dict[str, tuple[str, ...]] = {
    TASK: (
        "model_name",
        "env",
        "dataset",
        "dataset_path",
        "file_path",
        "dataset_builder",
        "test_path",
        "test_size",
        "renderer_name",
    ),
    "Training": (
        "learning_rate",
        "batch_size",
        "groups_per_batch",
        "group_size",
        "num_epochs",
        "max_steps",
        "num_steps",
        "lora_rank",
        "max_length",
        "loss_fn",
        "loss_fn_config",
        "advantage_normalization",
        "loss_normalization",
        "kl_penalty_coef",
        "dpo_beta",
        "dpo_loss",
        "lr_schedule",
        "warmup_steps",
        "seed",
        "load_checkpoint_path",
        "weight_decay",
        "grad_clip_norm",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "train_attn",
        "train_mlp",
        "train_unembed",
        "train_on_what",
        "num_substeps",
        "remove_constant_reward_groups",
        "kl_discount_factor",
        "kl_reference_model",
        "kl_reference_path",
        "kl_reference_config",
        "compute_post_kl",
        "label_smoothing",
        "simpo_gamma",
        "reference_model_name",
        "max_steps_off_policy",
        "num_minibatches",
        "async_config",
        "stream_minibatch_config",
        "submit_ahead",
        "random_rewards",
    ),
    "Sampling": (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "eval_temperature",
        "rollout_max_retries",
        "rollout_error_tolerance",
        "rollout_config",
        "termination",
    ),
    "Checkpoints": (
        "log_path",
        "behavior_if_log_dir_exists",
        "allow_config_change",
        "save_every",
        "save_every_tokens",
        "save_every_seconds",
        "rolling_save_every",
        "rolling_ttl_seconds",
        "ttl_seconds",
        "async_periodic_saves",
    ),
    "Evaluation and logging": (
        "eval_every",
        "infrequent_eval_every",
        "evaluator_builders",
        "infrequent_evaluator_builders",
        "show_samples",
        "num_groups_to_log",
        "rollout_json_export",
        "wandb_project",
        "wandb_name",
        "session_name",
        "recipe_name",
        "enable_trace",
        "span_chart_every",
        "store",
    ),
    "Backend": ("backend", "base_url", "device", "dtype", "num_replicas"),
}
_PLACES = {
    name: (group, place)
    for group, names in _GROUPS.items()
    for place, name in enumerate(names)
}  # fmt: skip


def group_keys(keys: Iterable[Key]) -> list[tuple[str, list[Key]]]:
    """The keys by group, the title of each with it; groups without keys are left out."""
    found: dict[str, list[tuple[int, Key]]] = {group: [] for group in _GROUPS}
    for key in keys:
        # The keys of a nested object stand behind the object itself.
        group, place = _PLACES.get(key.name.partition(".")[0], (TASK, len(_PLACES)))
        found[group].append((place, key))
    return [
        (group, [key for _, key in sorted(pairs, key=lambda pair: pair[0])])
        for group, pairs in found.items()
        if pairs
    ]
