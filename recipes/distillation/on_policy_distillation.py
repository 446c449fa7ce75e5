"""On-policy distillation: the student writes, a teacher judges every token of it.

    python -m recipes.distillation.on_policy_distillation
    python -m recipes.distillation.on_policy_distillation teacher_checkpoint=tinker://…
    python -m recipes.distillation.on_policy_distillation dataset=prompts.jsonl \\
        teacher_prompt=style.txt max_tokens=128
    python -m recipes.distillation.on_policy_distillation dataset=deepmath model_name=… \\
        teacher_model=… teacher_renderer_name=… lora_rank=128 groups_per_batch=1024 group_size=4

Without a larger model at hand a model can teach itself, if as a teacher it knows more than as a
student. By default the teacher is the student before training, and sees three worked examples and
the answer behind each question ("What is 3 + 4?"): what it says knowing the answer, the student
learns to say without. A ``teacher_prompt`` that the teacher alone sees is learned in the same way,
until the student needs it no more; ``teacher_checkpoint`` takes a trained model for a teacher, such
as the one of ``recipes.rl_basic`` (``for sampling`` in its last lines).
"""

from __future__ import annotations

import chz

from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.recipes.distillation.on_policy_settings import (
    OnPolicySettings,
    TaughtSettings,
    on_policy_config,
    run,
    taught,
)
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(TaughtSettings, OnPolicySettings):
    """Settings of the recipe; what is None is derived and printed."""


def build_config(cli: CLIConfig) -> train_on_policy.Config:
    """The task, the teacher, and what is derived from the model."""
    check_model(cli)
    return on_policy_config(cli, "on_policy_distillation", [taught(cli, cli)])


async def main(config: CLIConfig) -> None:
    """Teaches a student what its teacher would say in its place."""
    await run(config, build_config(config))


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
