"""The run that both sides make: that of ``recipes.rl_basic``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_cookbook.recipes.rl_basic import CLIConfig


def recipe_settings(job: dict[str, Any], log_path: Path) -> CLIConfig:
    """The recipe's settings: no evaluation and no checkpoint on the way, the rest as asked."""
    from tinker_cookbook.recipes.rl_basic import CLIConfig

    return CLIConfig(
        model_name=job["model_name"],
        renderer_name=job["renderer_name"],
        backend="local",
        device=job["device"],
        dtype=job["dtype"],
        groups_per_batch=job["groups_per_batch"],
        group_size=job["group_size"],
        max_tokens=job["max_tokens"],
        lora_rank=job["lora_rank"],
        train_unembed=job["train_unembed"],
        learning_rate=job["learning_rate"],
        seed=job["seed"],
        num_batches=job["steps"],
        num_test=0,
        eval_every=0,
        save_every=0,
        log_path=str(log_path),
        behavior_if_log_dir_exists="raise",
    )
