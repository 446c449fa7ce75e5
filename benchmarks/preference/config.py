"""Settings of the comparison, and the recipe's settings for the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz

from benchmarks.harness import check_least
from benchmarks.trl_comparison import SidesConfig

if TYPE_CHECKING:
    from tinker_cookbook.recipes.preference.dpo.train import CLIConfig


@chz.chz
class Config(SidesConfig):
    """Settings of the comparison with TRL's DPOTrainer."""

    dataset: str = chz.field(default="example", doc="As in the recipe: a name or a file of pairs")
    batch_size: int = chz.field(default=8, doc="Pairs per step")
    max_length: int = chz.field(default=512, doc="Tokens after which answers are cut")
    dpo_beta: float = chz.field(default=0.1, doc="Scale of the rewards")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
        super().check()
        check_least(self, {"batch_size": 1, "max_length": 2})


def recipe_settings(job: dict[str, Any], log_path: Path) -> CLIConfig:
    """Returns the recipe's settings without evaluations and checkpoints."""
    from tinker_cookbook.recipes.preference.dpo.train import CLIConfig

    given = ("model_name", "renderer_name", "device", "dtype", "lora_rank", "train_unembed", "seed")
    given += ("learning_rate", "dataset", "batch_size", "max_length", "dpo_beta")
    return CLIConfig(
        **{name: job[name] for name in given},
        test_size=None if job["dataset"] == "example" else 0,
        backend="local",
        lr_schedule="constant",
        max_steps=job["steps"],
        num_epochs=job["steps"],  # max_steps ends it
        eval_every=0,
        infrequent_eval_every=0,
        save_every=0,
        show_samples=0,
        log_path=str(log_path),
        behavior_if_log_dir_exists="raise",
    )
