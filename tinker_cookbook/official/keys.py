"""Second names of keys of the command line, most of them names of the official cookbook."""

from __future__ import annotations

_BUILDER = {"dataset_builder.renderer_name": "renderer_name"}
_RECIPES = {
    "code_rl.train.CLIConfig": {"log_dir": "log_path"},
    "distillation.on_policy_distillation_harbor_multi_turn.CLIConfig": {"task_name": "dataset"},
    "preference.rlhf.settings.CLIConfig": {"base_model": "model_name"},
    "rl_basic.CLIConfig": {
        **_BUILDER,
        "dataset_builder.batch_size": "groups_per_batch",
        "dataset_builder.group_size": "group_size",
        "dataset_builder.n_batches": "n_batches",
        "dataset_builder.seed": "seed",
    },
    "rl_loop.Config": {
        "batch_size": "groups_per_batch",
        "max_steps": "num_steps",
        "n_batches": "num_steps",
    },
    "rubric.train.JudgedSettings": {"train_group_size": "group_size"},
    "search_tool.offline_eval.CLIConfig": {
        "tinker_checkpoint_url": "model_path",
        "base_model": "model_name",
    },
    "sl_basic.CLIConfig": {
        "dataset_builder.file_path": "dataset_path",
        "dataset_builder.test_size": "test_size",
        **{
            f"dataset_builder.common_config.{key}": key
            for key in ("batch_size", "max_length", "renderer_name", "train_on_what")
        },
    },
}

KEYS: dict[str, dict[str, str]] = {
    "chat.__main__.Config": {"base_model": "model_name"},
    "eval.__main__.Config": {
        "base_model": "model_name",
        "max_examples": "limit",
        "save_dir": "out",
    },
    "rl.config.Config": {"batch_size": "groups_per_batch", "num_batches": "n_batches"},
    "rl.envs.play_w_env.Config": {"renderer_name": "dataset_builder.renderer_name"},
    "weights.commands.PublishSettings": {"private_repo": "private"},
    "weights.gguf.GGUFSettings": {"outtype": "quant", "dtype": "quant"},
    "weights.settings.ExportSettings": {
        "output_path": "out",
        "output": "out",
        "output_dir": "out",
    },
    **{f"recipes.{place}": names for place, names in _RECIPES.items()},
}
"""Class, without the name of this package -> second name -> field. Subclasses have them too."""
