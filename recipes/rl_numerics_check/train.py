"""Checks that sampler and trainer agree on long episodes with many turns.

    python -m recipes.rl_numerics_check.train task.require_tool_calls=false random_rewards=true \\
        task.num_pages_min=8 task.num_pages_max=8 task.page_chars=400
    python -m recipes.rl_numerics_check.train model_name=… group_size=8 groups_per_batch=8

Every step logs ``optim/kl_sample_train_v1`` and ``_v2``: how far the log-probabilities of the
sampler are from the trainer's, on the same tokens and weights. They are also split by the
length of the context (``kl_depth_edges``), because an error in long contexts is hidden in the mean.
If all rewards are 0, nothing is trained and no KL is measured; then set ``random_rewards=true``.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.rl_numerics_check.env import (
    DEFAULT_MAX_TRAJECTORY_TOKENS,
    GENERATED,
    CountingDatasetBuilder,
    CountingTaskConfig,
)
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "rl_numerics_check"
    model_name: str = DEMO_MODEL
    groups_per_batch: int = 8
    group_size: int = 8
    learning_rate: float | None = None  # a quarter of the recommended rate
    task: CountingTaskConfig = chz.field(default_factory=CountingTaskConfig, doc="The task")
    corpus: str = chz.field(
        default=GENERATED, doc="generated, wikitext (WikiText-103 of the Hub), or a text file"
    )
    max_trajectory_tokens: int = number(
        DEFAULT_MAX_TRAJECTORY_TOKENS, "Maximum tokens of an episode", low=1
    )
    n_batches: int = number(1000, "Steps per epoch", low=1)
    kl_depth_edges: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    max_tokens: int = 1024
    eval_every: int = 0

    def build_dataset(self) -> CountingDatasetBuilder:
        """Returns the counting task."""
        return self.builder_of(CountingDatasetBuilder, max_generation_tokens=self.max_tokens)


def build_config(cli_config: CLIConfig) -> train.Config:
    """Returns the config of the loop."""
    return cli_config.resolved()


async def main(config: CLIConfig) -> None:
    """Trains on the counting task, and logs the KL by context length."""
    await train.main(config)


if __name__ == "__main__":
    run_entrypoint(main)
