"""Reinforcement learning on terminal tasks.

    python -m recipes.harbor_rl.train model_name=Qwen/Qwen3-8B
    python -m recipes.harbor_rl.train dataset=FOLDER model_name=…

Without ``dataset`` ten example tasks are used. Each episode has its own sandbox on
this machine; the tests run in a second one. Run ``python -m recipes.harbor_rl.check`` first (9 s
for the example tasks): it shows which tasks can be solved here. We have no learning curve: the demo
model cannot call tools.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.harbor_rl.harbor_env import (
    EXAMPLES,
    HarborDatasetBuilder,
    HarborSettings,
    HarborTask,
    SandboxFactory,
    load_harbor_tasks,
)
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(HarborSettings, train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "harbor_rl"
    model_name: str = DEMO_MODEL
    groups_per_batch: int = 8
    group_size: int = 4
    learning_rate: float | None = None  # a quarter of the recommended rate
    max_tokens: int = 2048
    dataset: str = chz.field(
        default=EXAMPLES, doc="Folder of tasks, or a dataset in Harbor's cache"
    )
    sandbox_timeout: int = 3600

    def build_dataset(
        self, tasks: list[HarborTask] | None = None, sandbox_factory: SandboxFactory | None = None
    ) -> HarborDatasetBuilder:
        """Returns the tasks; default: those of ``dataset``, in sandboxes on this machine."""
        return self.builder_of(
            HarborDatasetBuilder,
            tasks=load_harbor_tasks(self.dataset) if tasks is None else tasks,
            max_generation_tokens=self.max_generation_tokens or self.max_tokens,
            sandbox_factory=sandbox_factory,
        )


async def cli_main(
    cli_config: CLIConfig,
    tasks: list[HarborTask],
    sandbox_factory: SandboxFactory | None = None,
) -> None:
    """Trains on ``tasks`` with sandboxes of ``sandbox_factory``; default: local ones."""
    dataset = cli_config.build_dataset(tasks, sandbox_factory)
    await train.main(chz.replace(cli_config, dataset_builder=dataset))


async def main(config: CLIConfig) -> None:
    """Trains on the tasks of the settings."""
    await train.main(config)


if __name__ == "__main__":
    run_entrypoint(main)
