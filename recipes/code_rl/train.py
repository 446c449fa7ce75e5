"""Reinforcement learning of writing programs, graded by tests in a sandbox.

    python -m recipes.code_rl.train                         # one-line functions, the demo model
    python -m recipes.code_rl.train dataset=deepcoder model_name=… group_size=16
    python -m recipes.code_rl.train dataset_path=tasks.jsonl test_path=held_out.jsonl

``deepcoder`` and ``mbpp`` come from the Hub, or from files in their formats
(``dataset_path``, ``test_path``). Programs run in a sandbox on this machine: docs/sandbox.md.
On one-line functions the reward rises from 0.01 - 0.16 to 0.64 - 0.68 in 8 steps (7 minutes).
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.code_rl.code_env import CodeSettings, DeepcoderDatasetBuilder
from tinker_cookbook.recipes.code_rl.tasks import ONE_LINE
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.sandbox import SandboxBackend, available_tier
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(CodeSettings, train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "code_rl"
    model_name: str = DEMO_MODEL
    groups_per_batch: int = 4
    group_size: int = 8
    learning_rate: float | None = None  # a quarter of the recommended rate
    max_tokens: int = 32
    dataset: str = ONE_LINE
    num_test: int | None = 28
    max_turns: int = 1

    def build_dataset(self) -> DeepcoderDatasetBuilder:
        """Returns the tasks."""
        if self.sandbox_backend in (None, SandboxBackend.LOCAL):
            # Before anything else: without a sandbox no program may run.
            available_tier()
        return self.builder_of(DeepcoderDatasetBuilder, max_generation_tokens=self.max_tokens)


async def main(config: CLIConfig) -> None:
    """Trains a model to write programs."""
    await train.main(config)


cli_main = main


if __name__ == "__main__":
    run_entrypoint(main)
