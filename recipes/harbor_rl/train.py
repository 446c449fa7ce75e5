"""Reinforcement learning on terminal tasks.

    python -m recipes.harbor_rl.train model_name=Qwen/Qwen3-8B
    python -m recipes.harbor_rl.train dataset=FOLDER model_name=…

Without ``dataset`` ten example tasks are used. Each episode has its own sandbox on
this machine; the tests run in a second one.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.harbor_rl.harbor_env import (
    EXAMPLES,
    HarborDatasetBuilder,
    HarborTask,
    SandboxFactory,
    load_harbor_tasks,
)
from tinker_cookbook.recipes.start import fill
from tinker_cookbook.rl import train
from tinker_cookbook.rl.settings import RLSettings, rl_config, run
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(RLSettings):
    """Settings of the recipe, in addition to those of every RL recipe."""

    dataset: str = chz.field(
        default=EXAMPLES, doc="Folder of tasks, or a dataset in Harbor's cache"
    )
    max_turns: int = chz.field(default=10, doc="Maximum answers of the model")
    sandbox_timeout: int = chz.field(default=3600, doc="Lifetime of a sandbox in seconds")
    command_timeout: int = chz.field(default=120, doc="Seconds for a command of the model")
    grader_timeout: int = chz.field(default=60, doc="Seconds for the tests")
    max_trajectory_tokens: int = chz.field(default=32 * 1024, doc="Maximum tokens of an episode")
    max_generation_tokens: int | None = chz.field(
        default=None, doc="Tokens reserved for an answer; default: max_tokens"
    )
    context_overflow_reward: float = chz.field(
        default=-0.1, doc="Reward of an answer that was cut off"
    )
    num_test: int | None = chz.field(
        default=None, doc="Tasks held out for evaluation; default: evaluate on all"
    )
    group_size: int = chz.field(default=4, doc="Episodes of a task")
    max_tokens: int = chz.field(default=2048, doc="Maximum tokens of an answer")


def build_config(
    cli: CLIConfig, tasks: list[HarborTask], sandbox_factory: SandboxFactory | None = None
) -> train.Config:
    """Builds the dataset and the config of the run."""
    check_model(cli)
    dataset = fill(
        HarborDatasetBuilder,
        cli,
        tasks=tasks,
        batch_size=cli.groups_per_batch,
        renderer_name=cli.renderer,
        max_generation_tokens=cli.max_generation_tokens or cli.max_tokens,
        sandbox_factory=sandbox_factory,
    )
    return rl_config(cli, "harbor_rl", dataset)


async def cli_main(
    cli_config: CLIConfig,
    tasks: list[HarborTask],
    sandbox_factory: SandboxFactory | None = None,
) -> None:
    """Trains on ``tasks`` with sandboxes of ``sandbox_factory``; default: local ones."""
    await run(cli_config, build_config(cli_config, tasks, sandbox_factory))


async def main(config: CLIConfig) -> None:
    """Trains on the tasks of the settings."""
    await cli_main(config, load_harbor_tasks(config.dataset))


if __name__ == "__main__":
    run_entrypoint(main)
