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
    CountingDatasetBuilder,
    CountingTaskConfig,
)
from tinker_cookbook.recipes.rl_numerics_check.task import GENERATED
from tinker_cookbook.recipes.start import fill
from tinker_cookbook.rl import train
from tinker_cookbook.rl.settings import RLSettings, rl_config, run
from tinker_cookbook.training.config import check_model, number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(RLSettings):
    """Settings of the recipe, in addition to those of every RL recipe."""

    task: CountingTaskConfig = chz.field(default_factory=CountingTaskConfig, doc="The task")
    corpus: str = chz.field(
        default=GENERATED, doc="generated, wikitext (WikiText-103 of the Hub), or a text file"
    )
    max_trajectory_tokens: int = number(
        DEFAULT_MAX_TRAJECTORY_TOKENS, "Maximum tokens of an episode", low=1
    )
    n_batches: int = number(1000, "Steps per epoch", low=1)
    kl_depth_edges: tuple[int, ...] = chz.field(
        default=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        doc="Context lengths at which the KL is split",
    )
    max_tokens: int = chz.field(default=1024, doc="Maximum tokens of an answer")
    eval_every: int = number(0, "Steps between evaluations; 0: never")


def build_config(cli_config: CLIConfig) -> train.Config:
    """Builds the dataset and the config of the run."""
    check_model(cli_config)
    dataset = fill(
        CountingDatasetBuilder,
        cli_config,
        batch_size=cli_config.groups_per_batch,
        max_generation_tokens=cli_config.max_tokens,
    )
    return rl_config(cli_config, "rl_numerics_check", dataset)


async def main(config: CLIConfig) -> None:
    """Trains on the counting task, and logs the KL by context length."""
    await run(config, build_config(config))


if __name__ == "__main__":
    run_entrypoint(main)
