"""Reinforcement learning on a multi-turn game: guess a number from "higher" and "lower".

    python -m recipes.multiplayer_rl.guess_number.train
    python -m recipes.multiplayer_rl.guess_number.train high=1000 max_turns=10 model_name=…

With the defaults (1 to 7, three guesses) binary search always wins, and random guesses win three
games of seven. The range is small because the demo model is small.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import Game, GuessNumberDatasetBuilder
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.utils.command_line.entrypoint import also_named, run_entrypoint


@also_named(n_batches="num_batches")
@chz.chz
class CLIConfig(train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "guess_number"
    model_name: str = DEMO_MODEL
    learning_rate: float | None = None  # a quarter of the recommended rate
    low: int = chz.field(default=1, doc="Smallest possible number")
    high: int = chz.field(default=7, doc="Largest possible number")
    max_turns: int = chz.field(default=3, doc="Guesses in a game")
    malformed_reward: float = chz.field(
        default=-0.1, doc="Reward of an answer that has no number in the range, or is cut off"
    )
    groups_per_batch: int = 7  # each number of the range once
    group_size: int = 16
    max_tokens: int = 8
    num_batches: int = chz.field(default=60, doc="Steps per epoch")
    num_test: int = chz.field(default=7, doc="Numbers to evaluate on; 0: no evaluation")

    def build_dataset(self) -> GuessNumberDatasetBuilder:
        """Returns the game."""
        return GuessNumberDatasetBuilder(
            game=Game(
                low=self.low,
                high=self.high,
                max_turns=self.max_turns,
                malformed_reward=self.malformed_reward,
            ),
            num_batches=self.num_batches,
            num_test=self.num_test,
            **self.of_problems(),
        )


def build_config(cli_config: CLIConfig) -> train.Config:
    """Returns the config of the loop."""
    return cli_config.resolved()


async def main(config: CLIConfig) -> None:
    """Trains a model to guess numbers."""
    await train.main(config)


if __name__ == "__main__":
    run_entrypoint(main)
