"""Reinforcement learning on games of TextArena, by self-play and against earlier snapshots.

    python -m recipes.multiplayer_rl.text_arena.train model_name=…
    python -m recipes.multiplayer_rl.text_arena.train game_name=Nim-v0 opponents=self,pool,random
    python -m recipes.multiplayer_rl.text_arena.train model_name=MODEL renderer_name=role_colon \\
        game_name=TicTacToe-v0-train show_rules=False max_tokens=1 test_opponent=optimal

In the last command, ``MODEL`` is the folder that ``text_arena.tiny_model`` has written; expected
figures and minutes are in docs/environments.md. In every second group the opponent is an earlier
snapshot of the run (``opponents=self,pool``), because pure self-play reinforces any asymmetry
between the seats, and the official recipe reports that it collapses after about 80 steps.
"""

from __future__ import annotations

from functools import partial

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.env import (
    OPPONENTS,
    STOP_CONDITION,
    TextArenaDatasetBuilder,
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.pool import Snapshots
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import OpponentType
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(train.Config, GameSettings):
    """Settings of the recipe, in addition to those of the game and of the loop."""

    recipe_name: str = "text_arena"
    model_name: str = DEMO_MODEL
    learning_rate: float | None = None  # a quarter of the recommended rate
    opponents: str = chz.field(
        default="self,pool",
        doc=f"Opponents, which the groups use in rotation: {', '.join(OPPONENTS)}",
    )
    batch_size: int = chz.field(default=512, doc="Trained seats per step")
    group_size: int = 16
    num_train_datapoints: int = chz.field(default=40960, doc="Trained seats per epoch")
    test_opponent: OpponentType = chz.field(
        default="base_model", doc="base_model, random or optimal"
    )
    num_test_datapoints: int = chz.field(default=128, doc="Games of an evaluation; 0: none")
    max_tokens: int = 64
    stop_condition: str | None = chz.field(
        default=STOP_CONDITION[0], doc="Text that ends a move; None: the renderer's stop sequences"
    )
    eval_every: int = 5
    snapshot_every: int = chz.field(default=10, doc="Steps between snapshots for the pool; 0: none")
    pool_size: int = chz.field(
        default=20, doc="Snapshots to play against: the first and the newest ones"
    )

    def build_dataset(self) -> TextArenaDatasetBuilder:
        """Returns the games and the opponents."""
        opponents = tuple(filter(None, map(str.strip, self.opponents.split(","))))
        if "pool" in opponents and self.snapshot_every < 1:
            raise ConfigurationError(
                f"snapshot_every: got {self.snapshot_every} with opponents={self.opponents}; "
                "expected at least 1, or no pool"
            )
        if "pool" in opponents and (self.async_config or self.max_steps_off_policy is not None):
            raise ConfigurationError(
                "opponents: got pool in an asynchronous run, where the members of the pool would "
                "depend on timing; expected a synchronous run, or opponents without pool"
            )
        return self.builder_of(
            TextArenaDatasetBuilder,
            batch_size=self.batch_size,
            log_path=self.run_path,
            opponents=opponents,
            stop_condition=() if self.stop_condition is None else (self.stop_condition,),
        )

    def resolved(self) -> train.Config:
        """Returns the config of the loop."""
        # An asynchronous run forms its batches of this many groups.
        groups = max(1, self.batch_size // self.group_size)
        config = super(CLIConfig, chz.replace(self, groups_per_batch=groups)).resolved()
        if not self.snapshot_every:
            return config
        builders = [*config.infrequent_evaluator_builders, partial(Snapshots, self.run_path)]
        return chz.replace(
            config,
            infrequent_evaluator_builders=builders,
            infrequent_eval_every=self.snapshot_every,
        )


def build_config(cli_config: CLIConfig) -> train.Config:
    """Returns the config of the loop."""
    return cli_config.resolved()


async def main(config: CLIConfig) -> None:
    """Trains a model to play."""
    await train.main(config)


if __name__ == "__main__":
    run_entrypoint(main)
