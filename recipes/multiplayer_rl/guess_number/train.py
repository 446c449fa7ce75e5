"""Reinforcement learning on a multi-turn game: guess a number from "higher" and "lower".

    python -m recipes.multiplayer_rl.guess_number.train
    python -m recipes.multiplayer_rl.guess_number.train high=1000 max_turns=10 model_name=…

With the defaults (1 to 7, three guesses) binary search always wins, and random guesses win three
games of seven. The range is small because the demo model is small. With max_steps=25 the share of
games won rises from 0.00 to 0.59 - 0.82 in 4 minutes on two CPU cores.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import Game, GuessNumberDatasetBuilder
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(Game, train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "guess_number"
    model_name: str = DEMO_MODEL
    learning_rate: float | None = None  # a quarter of the recommended rate
    groups_per_batch: int = 7  # each number of the range once
    group_size: int = 16
    max_tokens: int = 8
    n_batches: int = chz.field(default=60, doc="Steps per epoch")
    num_test: int = chz.field(default=7, doc="Numbers to evaluate on; 0: no evaluation")

    def build_dataset(self) -> GuessNumberDatasetBuilder:
        """Returns the game."""
        return self.builder_of(GuessNumberDatasetBuilder, game=Game(**self.values_of(Game)))


def build_config(cli_config: CLIConfig) -> train.Config:
    """Returns the config of the loop."""
    return cli_config.resolved()


async def main(config: CLIConfig) -> None:
    """Trains a model to guess numbers."""
    await train.main(config)


if __name__ == "__main__":
    run_entrypoint(main)
