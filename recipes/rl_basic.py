"""Reinforcement learning on a small task: addition of two digits.

    python -m recipes.rl_basic
    python -m recipes.rl_basic model_name=… learning_rate=… group_size=… log_path=…

Each step samples eight answers to each of eight problems ("What is 3 + 4?"). An answer whose last
number is the sum has reward 1. The model (SmolLM2-135M-Instruct by default) is trained towards the
answers with a higher reward than the mean of their group. The problems are generated; only the
model is downloaded.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.recipes.start import DEMO_MODEL, blueprint_of, fill
from tinker_cookbook.rl import train
from tinker_cookbook.rl.settings import RLSettings, rl_config, run
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import also_named, run_entrypoint

DEFAULT_MODEL_NAME = DEMO_MODEL


# The second names are the builder's names in the original cookbook's recipe.
@also_named(
    n_batches="num_batches",
    dataset_builder__batch_size="groups_per_batch",
    dataset_builder__group_size="group_size",
    dataset_builder__renderer_name="renderer_name",
    dataset_builder__n_batches="num_batches",
    dataset_builder__seed="seed",
    kl_reference_config__base_model="kl_reference_model",
    kl_reference_config__load_checkpoint_path="kl_reference_path",
)
@chz.chz
class CLIConfig(RLSettings):
    """Settings of the recipe, in addition to those of every RL recipe."""

    max_operand: int = chz.field(default=9, doc="Largest operand of a + b")
    include_fewshot: bool = chz.field(
        default=False, doc="Show a worked example before the question"
    )
    num_test: int = chz.field(default=10, doc="Sums held out for evaluation; 0: no evaluation")
    num_batches: int = chz.field(default=40, doc="Steps per epoch")
    max_tokens: int = chz.field(default=12, doc="Maximum tokens of an answer")
    eval_every: int = chz.field(default=10, doc="Steps between evaluations; 0: never")
    save_every: int = chz.field(default=10, doc="Steps between checkpoints")


def build_config(cli: CLIConfig) -> train.Config:
    """Builds the dataset of sums and the config of the run."""
    check_model(cli)
    return rl_config(cli, "rl_basic", fill(ArithmeticDatasetBuilder, cli))


def build_config_blueprint(model_name: str = DEFAULT_MODEL_NAME) -> chz.Blueprint[train.Config]:
    """Returns a run of a model as a blueprint with settings that can be changed."""
    return blueprint_of(build_config(CLIConfig(model_name=model_name)))


async def main(config: CLIConfig) -> None:
    """Trains a model to add."""
    await run(config, build_config(config))


if __name__ == "__main__":
    run_entrypoint(main)
