"""On-policy distillation from several teachers at once, each of which judges answers of its field.

    python -m recipes.distillation.on_policy_multi_teacher
    python -m recipes.distillation.on_policy_multi_teacher model_name=… lora_rank=128 \\
        first.dataset=deepmath first.teacher_model=… second.dataset=tulu3 second.teacher_model=… \\
        groups_per_batch=512 group_size=4 max_tokens=4096

A batch has ``groups_per_batch`` prompts of each dataset. By default the student (SmolLM2) learns
sums from a teacher that sees the answers, and at the same time learns to be brief from one that was
told to be: both are the student before training. ``teacher_kl/dataset_0`` and
``teacher_kl/dataset_1`` tell how far it is from either.
"""

from __future__ import annotations

import chz

from recipes.distillation.on_policy_settings import (
    DATASETS,
    EXAMPLE,
    OnPolicySettings,
    TaughtSettings,
    on_policy_config,
    run,
    taught,
)
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.entrypoint import run_entrypoint


@chz.chz
class SecondSettings(TaughtSettings):
    """The second dataset and its teacher."""

    dataset: str = chz.field(default=EXAMPLE, doc=f"{', '.join(DATASETS)}, or a JSONL file")


@chz.chz
class CLIConfig(OnPolicySettings):
    """Settings of the recipe; what is None is derived and printed."""

    first: TaughtSettings = chz.field(
        default_factory=TaughtSettings, doc="A dataset and its teacher"
    )
    second: SecondSettings = chz.field(
        default_factory=SecondSettings, doc="Another one and its teacher"
    )
    groups_per_batch: int = chz.field(default=8, doc="Prompts a step of each dataset")
    max_tokens: int | None = chz.field(  # type: ignore[assignment]
        default=64, doc="Most tokens to sample in an answer"
    )


def build_config(cli: CLIConfig) -> train_on_policy.Config:
    """Both tasks, their teachers, and what is derived from the model."""
    check_model(cli)
    parts = [taught(cli, cli.first, "first."), taught(cli, cli.second, "second.")]
    return on_policy_config(cli, "on_policy_multi_teacher", parts)


async def main(config: CLIConfig) -> None:
    """Teaches one student what several teachers know."""
    await run(config, build_config(config))


if __name__ == "__main__":
    run_entrypoint(main)
