"""Reinforcement learning on a multi-turn game: guess a number from "higher" and "lower".

    python -m recipes.multiplayer_rl.guess_number.train
    python -m recipes.multiplayer_rl.guess_number.train high=1000 max_turns=10 model_name=…

With the defaults (1 to 7, three guesses) binary search always wins, and random guesses win three
games of seven. The range is small because the demo model is small.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import Game, GuessNumberDatasetBuilder
from tinker_cookbook.recipes.start import fill
from tinker_cookbook.rl import train
from tinker_cookbook.rl.settings import RLSettings, rl_config, run
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import also_named, run_entrypoint


@also_named(n_batches="num_batches")
@chz.chz
class CLIConfig(RLSettings):
    """Settings of the recipe, in addition to those of every RL recipe."""

    low: int = chz.field(default=1, doc="Smallest possible number")
    high: int = chz.field(default=7, doc="Largest possible number")
    max_turns: int = chz.field(default=3, doc="Guesses in a game")
    malformed_reward: float = chz.field(
        default=-0.1, doc="Reward of an answer that has no number in the range, or is cut off"
    )
    groups_per_batch: int = chz.field(
        default=7, doc="Numbers per step; default: each number of the range once"
    )
    group_size: int = chz.field(default=16, doc="Games per number")
    max_tokens: int = chz.field(default=8, doc="Maximum tokens of a guess")
    num_batches: int = chz.field(default=60, doc="Steps per epoch")
    num_test: int = chz.field(default=7, doc="Numbers to evaluate on; 0: no evaluation")


def build_config(cli: CLIConfig) -> train.Config:
    """Builds the game and the config of the run."""
    check_model(cli)
    dataset = fill(GuessNumberDatasetBuilder, cli, game=fill(Game, cli))
    return rl_config(cli, "guess_number", dataset)


async def main(config: CLIConfig) -> None:
    """Trains a model to guess numbers."""
    await run(config, build_config(config))


if __name__ == "__main__":
    run_entrypoint(main)
