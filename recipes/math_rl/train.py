"""Reinforcement learning on mathematics with verifiable answers.

    python -m recipes.math_rl.train env=arithmetic
    python -m recipes.math_rl.train env=gsm8k dataset_path=FOLDER   # with train.jsonl, test.jsonl
    python -m recipes.math_rl.train env=math model_name=… group_size=16 groups_per_batch=64
    python -m recipes.math_rl.train env=reasoning_gym:chain_sum reasoning_gym_config.max_terms=3

``gsm8k``, ``math``, ``polaris`` and ``deepmath`` come from the Hub, or from your files
(``dataset_path``, ``test_path``: JSON lines with ``question`` or ``problem``, and ``answer``).
``arithmetic`` and the generators of reasoning-gym need no data.
"""

from __future__ import annotations

from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.recipes.math_rl.datasets import HUB_NAMES, MathDatasetBuilder, MathSettings
from tinker_cookbook.recipes.math_rl.reasoning_gym_env import ReasoningGymDatasetBuilder
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

GENERATOR_PREFIX = "reasoning_gym:"
ENVS = ("arithmetic", *HUB_NAMES)


@chz.chz
class CLIConfig(MathSettings, train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "math_rl"
    model_name: str = DEMO_MODEL
    groups_per_batch: int = 8
    group_size: int = 8
    learning_rate: float | None = None  # a quarter of the recommended rate
    env: str = chz.field(
        default="arithmetic", doc=f"{', '.join(ENVS)}, or {GENERATOR_PREFIX}GENERATOR"
    )
    num_test: int = 50
    max_operand: int = chz.field(default=99, doc="env=arithmetic: largest operand of a + b")
    num_problems: int = chz.field(
        default=1000, doc="env=arithmetic, reasoning_gym: problems to make for training"
    )
    reasoning_gym_config: dict[str, Any] = chz.field(
        default_factory=dict, doc="The generator's own settings: reasoning_gym_config.max_terms=3"
    )
    answer_tag: str | None = chz.field(
        default="answer", doc="reasoning_gym: tag around the answer; None: the reply is the answer"
    )

    def build_dataset(self) -> RLDatasetBuilder:
        """Returns the dataset that ``env`` names; raises for settings that it does not have."""
        _check_env(self)
        if self.env == "arithmetic":
            # The dataset counts steps, this recipe problems.
            steps = max(1, self.num_problems // (self.groups_per_batch or 1))
            return self.builder_of(ArithmeticDatasetBuilder, n_batches=steps)
        if self.env.startswith(GENERATOR_PREFIX):
            return self.builder_of(
                ReasoningGymDatasetBuilder,
                generator=self.env.removeprefix(GENERATOR_PREFIX),
                size=self.num_problems,
                config=self.reasoning_gym_config,
            )
        return self.builder_of(MathDatasetBuilder)


def _check_env(cli: CLIConfig) -> None:
    # Generated problems need no files.
    generator = cli.env.startswith(GENERATOR_PREFIX)
    if not generator and cli.env not in ENVS:
        raise ConfigurationError(
            f"env: got {cli.env!r}, expected one of {', '.join(ENVS)}, or "
            f"{GENERATOR_PREFIX}GENERATOR{nearest(cli.env, ENVS)}"
        )
    if (generator or cli.env == "arithmetic") and (path := cli.dataset_path or cli.test_path):
        raise ConfigurationError(
            f"dataset_path, test_path: got {path}, but env={cli.env} makes its own problems; "
            f"expected one of {', '.join(HUB_NAMES)}, whose problems they replace"
        )
    if cli.reasoning_gym_config and not generator:
        raise ConfigurationError(
            f"reasoning_gym_config: got {cli.reasoning_gym_config} with env={cli.env}, expected "
            f"env={GENERATOR_PREFIX}GENERATOR"
        )


async def main(config: CLIConfig) -> None:
    """Trains a model on mathematics."""
    await train.main(config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
