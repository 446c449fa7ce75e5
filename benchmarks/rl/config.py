"""Settings of the comparison, and the recipe's settings for the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz

from benchmarks.harness import check_least
from benchmarks.trl_comparison import SidesConfig
from tinker_cookbook.exceptions import ConfigurationError

if TYPE_CHECKING:
    from tinker_cookbook.recipes.rl_basic import CLIConfig


@chz.chz
class Config(SidesConfig):
    """Settings of the comparison with TRL's GRPOTrainer."""

    groups_per_batch: int = chz.field(default=8, doc="Problems per step")
    group_size: int = chz.field(default=8, doc="Samples of each problem")
    max_tokens: int = chz.field(default=10, doc="Maximum tokens of an answer")
    trl_batch_size: int | None = chz.field(
        default=None, doc="Samples of a training pass of TRL; default: all of a step"
    )

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.groups_per_batch * self.group_size

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings that are wrong whatever the model is."""
        super().check()
        check_least(self, {"groups_per_batch": 1, "max_tokens": 1, "group_size": 2})
        size = self.trl_batch_size
        if size is not None and (size < 1 or self.samples % size):
            raise ConfigurationError(
                f"trl_batch_size: got {size}, expected a divisor of groups_per_batch x group_size "
                f"= {self.samples}"
            )


def recipe_settings(job: dict[str, Any], log_path: Path) -> CLIConfig:
    """Returns the settings of ``recipes.rl_basic`` without evaluations and checkpoints."""
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
        n_batches=job["steps"],
        num_test=0,
        eval_every=0,
        save_every=0,
        log_path=str(log_path),
        behavior_if_log_dir_exists="raise",
    )
