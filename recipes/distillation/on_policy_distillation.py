"""On-policy distillation: a teacher scores every token that the student samples.

    python -m recipes.distillation.on_policy_distillation
    python -m recipes.distillation.on_policy_distillation teacher_checkpoint=tinker://…
    python -m recipes.distillation.on_policy_distillation dataset=prompts.jsonl \\
        teacher_prompt=style.txt max_tokens=128
    python -m recipes.distillation.on_policy_distillation dataset=deepmath model_name=… \\
        teacher_model=… teacher_renderer_name=… lora_rank=128 groups_per_batch=1024 group_size=4

By default the teacher is the student before training, with three worked examples and the answer to
each question ("What is 3 + 4?") in its prompt. The student's prompt does not have them, and it
learns to answer without them. A ``teacher_prompt`` that only the teacher gets is distilled in the
same way. ``teacher_checkpoint`` is the path of a trained teacher, such as the one that
``recipes.rl_basic`` prints in its last lines (``for sampling``). With the defaults the KL of an
answer falls from 11.2 to 0.66 nats in 25 steps (4 minutes).
"""

from __future__ import annotations

import chz

from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig
from tinker_cookbook.recipes.distillation.on_policy_settings import (
    OnPolicySettings,
    TeacherSettings,
    dataset_with_teacher,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(TeacherSettings, OnPolicySettings):
    """Settings of the recipe. Options that are None are derived and printed."""

    recipe_name: str = "on_policy_distillation"

    def build_dataset(self) -> list[DistillationDatasetConfig]:
        """Returns the dataset and its teacher."""
        return [dataset_with_teacher(self, self)]


async def main(config: CLIConfig) -> None:
    """Trains a student towards its teacher on its own samples."""
    await train_on_policy.main(config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
