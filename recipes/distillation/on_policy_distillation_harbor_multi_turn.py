"""On-policy distillation on terminal tasks: a teacher scores the student's turns with a tool.

    python -m recipes.distillation.on_policy_distillation_harbor_multi_turn \\
        model_name=… teacher_model=… dataset=FOLDER

Episodes are those of ``recipes.harbor_rl``, without tests and rewards. Only the student's tokens
are trained, not the output of its commands. Without ``dataset`` ten example tasks are used.
"""

from __future__ import annotations

from typing import Any, cast

import chz

from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.distillation.harbor_multiturn import (
    HarborDistillationDatasetBuilder,
    zero_reward,
)
from tinker_cookbook.recipes.distillation.on_policy_settings import (
    OnPolicyLoopSettings,
    on_policy_config,
    run,
)
from tinker_cookbook.recipes.harbor_rl.harbor_env import (
    EXAMPLES,
    HarborTask,
    SandboxFactory,
    load_harbor_tasks,
)
from tinker_cookbook.recipes.start import fill
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.checkpoints.weights_paths import weights_field
from tinker_cookbook.utils.command_line.entrypoint import also_named, run_entrypoint
from tinker_cookbook.utils.imports import lookup_func


@also_named(task_name="dataset")
@chz.chz
class CLIConfig(OnPolicyLoopSettings):
    """Settings of the recipe. Options that are None are derived and printed."""

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
    max_turns: int = chz.field(default=10, doc="Maximum answers of the model")
    sandbox_timeout: int = chz.field(default=600, doc="Lifetime of a sandbox in seconds")
    command_timeout: int = chz.field(default=120, doc="Seconds for a command of the model")
    max_trajectory_tokens: int = chz.field(default=32 * 1024, doc="Maximum tokens of an episode")
    group_size: int = chz.field(default=4, doc="Episodes of a task")
    max_tokens: int | None = chz.field(  # type: ignore[assignment]
        default=2048, doc="Maximum tokens of an answer"
    )


def build_config(cli: CLIConfig, tasks: list[HarborTask]) -> train_on_policy.Config:
    """Builds the dataset, the teacher and the config of the run."""
    check_model(cli)
    if not (cli.teacher_model or cli.teacher_checkpoint):
        raise ConfigurationError(
            "teacher_model, teacher_checkpoint: got neither, so the teacher would be the student "
            "itself; expected one of them"
        )
    dataset = fill(
        HarborDistillationDatasetBuilder,
        cli,
        tasks=tasks,
        batch_size=cli.groups_per_batch,
        renderer_name=cli.renderer,
        max_generation_tokens=cli.max_tokens,
        sandbox_factory=_factory(cli.sandbox_factory),
        reward_fn=zero_reward,
    )
    teacher = TeacherConfig(
        base_model=cli.teacher_model or cli.model_name,
        load_checkpoint_path=cli.teacher_checkpoint,
    )
    part = DistillationDatasetConfig(
        dataset_builder=dataset, teacher_config=teacher, groups_per_batch=cli.groups_per_batch
    )
    return on_policy_config(cli, "on_policy_distillation_harbor_multi_turn", [part])


def _factory(given: Any) -> SandboxFactory | None:
    if given in (None, "None"):
        return None
    try:
        found = lookup_func(given) if isinstance(given, str) else given
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigurationError(f"sandbox_factory: {given!r} is not found: {error}") from error
    if not callable(found):
        raise ConfigurationError(
            f"sandbox_factory: got {given!r}, expected module:callable, a function of a folder "
            "and a lifetime in seconds"
        )
    return cast(SandboxFactory, found)


async def cli_main(cli_config: CLIConfig, tasks: list[HarborTask]) -> None:
    """Trains a student towards its teacher on ``tasks``."""
    await run(cli_config, build_config(cli_config, tasks))


async def main(config: CLIConfig) -> None:
    """Trains on the tasks of the settings."""
    await cli_main(config, load_harbor_tasks(config.dataset))


if __name__ == "__main__":
    run_entrypoint(main)
