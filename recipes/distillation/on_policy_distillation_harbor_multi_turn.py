"""On-policy distillation on terminal tasks: a teacher scores the student's turns with a tool.

    python -m recipes.distillation.on_policy_distillation_harbor_multi_turn \\
        model_name=… teacher_model=… dataset=FOLDER

Episodes are those of ``recipes.harbor_rl``, without tests and rewards. Only the student's tokens
are trained, not the output of its commands. Without ``dataset`` ten example tasks are used.
"""

from __future__ import annotations

from typing import Any

import chz

from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.distillation.harbor_multiturn import (
    HarborDistillationDatasetBuilder,
    zero_reward,
)
from tinker_cookbook.recipes.distillation.on_policy_settings import OnPolicyLoopSettings
from tinker_cookbook.recipes.harbor_rl.harbor_env import (
    EXAMPLES,
    HarborSettings,
    HarborTask,
    load_harbor_tasks,
)
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.imports import lookup_func


@chz.chz
class CLIConfig(HarborSettings, OnPolicyLoopSettings):
    """Settings of the recipe. Options that are None are derived and printed."""

    recipe_name: str = "on_policy_distillation_harbor_multi_turn"
    teacher_model: str | None = chz.field(
        default=None, doc="Base model of the teacher; default: the student's"
    )
    teacher_checkpoint: str | None = weights_field(
        "sampler_weights", "The teacher's own weights on it"
    )
    dataset: str = chz.field(
        default=EXAMPLES, doc="Folder of tasks, or a dataset in Harbor's cache"
    )
    sandbox_factory: Any = chz.field(
        default=None, doc="Function that makes sandboxes, as module:callable; default: local ones"
    )
    group_size: int = 4
    max_tokens: int | None = 2048  # type: ignore[assignment]

    def build_dataset(
        self, tasks: list[HarborTask] | None = None
    ) -> list[DistillationDatasetConfig]:
        """Returns the tasks, by default those of ``dataset``, and their teacher."""
        if not (self.teacher_model or self.teacher_checkpoint):
            raise ConfigurationError(
                "teacher_model, teacher_checkpoint: got neither, so the teacher would be the "
                "student itself; expected one of them"
            )
        given = self.sandbox_factory
        dataset = self.builder_of(
            HarborDistillationDatasetBuilder,
            tasks=load_harbor_tasks(self.dataset) if tasks is None else tasks,
            max_generation_tokens=self.max_tokens,
            sandbox_factory=lookup_func(given) if isinstance(given, str) else given,
            reward_fn=zero_reward,
        )
        teacher = TeacherConfig(
            base_model=self.teacher_model or self.model_name,
            load_checkpoint_path=self.teacher_checkpoint,
        )
        return [
            DistillationDatasetConfig(
                dataset_builder=dataset,
                teacher_config=teacher,
                groups_per_batch=self.groups_per_batch,
            )
        ]


async def cli_main(cli_config: CLIConfig, tasks: list[HarborTask]) -> None:
    """Trains a student towards its teacher on ``tasks``."""
    datasets = cli_config.build_dataset(tasks)
    await train_on_policy.main(chz.replace(cli_config, dataset_configs=datasets))


async def main(config: CLIConfig) -> None:
    """Trains on the tasks of the settings."""
    await train_on_policy.main(config)


if __name__ == "__main__":
    run_entrypoint(main)
