"""On-policy distillation on the small story model: a run of seconds, as a command or called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chz
from naming_task import NamingDatasetBuilder

from tinker_cookbook import cli_utils
from tinker_cookbook.backends import connect
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig
from tinker_cookbook.training.lr_scheduling import LRSchedule
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

OPENINGS = [
    "Once upon a time, there was a little",
    "One day, Lily went to the park and saw a",
    "Tom was in the garden with his",
    "Mom said: look, there is a",
    "Ben and Mia wanted to play with the",
    "In the house there lived a small",
    "The sun was warm. On the grass sat a",
    "Sue had a new friend. It was a",
]
SAID = [
    " dog. The dog was very happy and wanted to play.",
    " big dog named Max. He liked to run in the park.",
    " dog and a cat. They were good friends.",
]


def train_teacher(model: str, name: str = "teacher") -> str:
    """Four steps on the openings, each with the texts of ``SAID`` behind it; the weights' path."""
    import tinker
    from tinker import types

    from tinker_cookbook.supervised.common import datum_from_model_input_weights
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    service = connect("local", device="cpu", dtype="float32").service
    client = service.create_lora_training_client(model, rank=8, seed=1).result()
    tokenizer = get_tokenizer(model)
    data = []
    for opening in OPENINGS:
        prompt = tokenizer.encode(opening)
        for said in SAID:
            ids = [*prompt, *tokenizer.encode(said, add_special_tokens=False)]
            weights = [0.0] * len(prompt) + [1.0] * (len(ids) - len(prompt))
            text = tinker.ModelInput.from_ints(ids)
            data.append(datum_from_model_input_weights(text, weights))
    for _ in range(4):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    path = client.save_weights_for_sampler(name).result().path
    service.close()
    return path


def taught(
    model: str, log_path: str | Path, teacher: str, **settings: Any
) -> train_on_policy.Config:
    """A run of ``settings.pop("steps")`` steps of 8 groups of 8."""
    data = {"num_batches": settings.pop("steps", 6), "group_size": settings.pop("group_size", 8)}
    return train_on_policy.Config(
        recipe_name="taught_stories",
        model_name=model,
        log_path=str(log_path),
        dataset_configs=[
            DistillationDatasetConfig(
                dataset_builder=NamingDatasetBuilder(
                    model=model, words=["dog"], openings=OPENINGS, **data
                ),
                teacher_config=TeacherConfig(base_model=model, load_checkpoint_path=teacher),
                groups_per_batch=8,
            )
        ],
        **{
            "backend": "local",
            "device": "cpu",
            "dtype": "float32",
            "max_tokens": 24,
            "learning_rate": 2e-3,
            "reward_coef": 0.0,
            "save_every": 0,
            **settings,
        },
    )


@chz.chz
class CLIConfig(train_on_policy.Config):
    """What a test sets on the command line."""

    recipe_name: str = "taught_stories"
    teacher: str
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior | None = "raise"
    compute_post_kl: bool = True
    max_tokens: int = 8
    learning_rate: float | None = 2e-3
    reward_coef: float = 0.0
    lr_schedule: LRSchedule = "linear"
    eval_every: int = 10

    def build_dataset(self) -> list[DistillationDatasetConfig]:
        short = taught(self.model_name, self.log_path, self.teacher, group_size=2)
        return short.dataset_configs


async def main(cli: CLIConfig) -> None:
    """Six steps of short answers."""
    await train_on_policy.main(cli)


if __name__ == "__main__":
    run_entrypoint(main)
