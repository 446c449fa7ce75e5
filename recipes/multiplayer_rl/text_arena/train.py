"""Reinforcement learning on games of TextArena, by self-play and against earlier snapshots.

    python -m recipes.multiplayer_rl.text_arena.train model_name=…
    python -m recipes.multiplayer_rl.text_arena.train game_name=Nim-v0 opponents=self,pool,random
    python -m recipes.multiplayer_rl.text_arena.train model_name=MODEL renderer_name=role_colon \\
        game_name=TicTacToe-v0-train show_rules=False max_tokens=1 test_opponent=optimal

In the last command, ``MODEL`` is the folder that ``text_arena.tiny_model`` has written. In every
second group the opponent is a snapshot of the run (``opponents=self,pool``), because pure self-play
reinforces any asymmetry between the seats, and the official recipe reports that it collapses after
about 80 steps.
"""

from __future__ import annotations

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.dataset import TextArenaDatasetBuilder
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import STOP_CONDITION
from tinker_cookbook.recipes.multiplayer_rl.text_arena.pool import LeagueBuilder, PoolSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import OpponentType
from tinker_cookbook.recipes.start import fill
from tinker_cookbook.rl import train
from tinker_cookbook.rl.settings import RLSettings, rl_config, run
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(RLSettings, GameSettings):
    """Settings of the recipe, in addition to those of the game and of every RL recipe."""

    opponents: str = chz.field(
        default="self,pool",
        doc="Opponents, which the groups use in rotation: self, pool, random, optimal, base_model",
    )
    batch_size: int = chz.field(default=512, doc="Trained seats per step")
    group_size: int = chz.field(default=16, doc="Trained seats that are compared with each other")
    num_train_datapoints: int = chz.field(default=40960, doc="Trained seats per epoch")
    test_opponent: OpponentType = chz.field(
        default="base_model", doc="base_model, random or optimal"
    )
    num_test_datapoints: int = chz.field(default=128, doc="Games of an evaluation; 0: none")
    max_tokens: int = chz.field(default=64, doc="Maximum tokens of a move")
    stop_condition: str | None = chz.field(
        default=STOP_CONDITION[0], doc="Text that ends a move; None: the renderer's stop sequences"
    )
    eval_every: int = chz.field(default=5, doc="Steps between evaluations; 0: never")
    snapshot_every: int = chz.field(default=10, doc="Steps between snapshots for the pool; 0: none")
    pool_size: int = chz.field(
        default=20, doc="Snapshots to play against: the first and the newest ones"
    )
    league_games: int = chz.field(
        default=16, doc="Games of a new snapshot against each member of the pool; 0: none"
    )
    league_opponents: str = chz.field(
        default="random", doc="Additional players of the league: random, optimal, base_model"
    )


def build_config(cli_config: CLIConfig) -> train.Config:
    """Builds the games, the opponent pool and the config of the run."""
    # An asynchronous run forms its batches of this many groups.
    groups = max(1, cli_config.batch_size // cli_config.group_size)
    cli = chz.replace(cli_config, groups_per_batch=groups)
    check_model(cli)
    opponents = names(cli.opponents)
    if "pool" in opponents and cli.snapshot_every < 1:
        raise ConfigurationError(
            f"snapshot_every: got {cli.snapshot_every} with opponents={cli.opponents}; expected at "
            "least 1, or no pool"
        )
    if "pool" in opponents and (cli.async_config or cli.max_steps_off_policy is not None):
        raise ConfigurationError(
            "opponents: got pool in an asynchronous run, where the members of the pool would "
            "depend on timing; expected a synchronous run, or opponents without pool"
        )
    pool = fill(
        PoolSettings,
        cli,
        renderer_name=cli.renderer,
        log_path=cli.log_path or cli_utils.default_log_path("text_arena"),
        stop_condition=() if cli.stop_condition is None else (cli.stop_condition,),
    )
    dataset = fill(
        TextArenaDatasetBuilder,
        cli,
        game=fill(GameSettings, cli),
        pool=pool,
        opponents=opponents,
        num_batches=max(1, cli.num_train_datapoints // cli.batch_size),
        num_test=cli.num_test_datapoints,
    )
    config = rl_config(cli, "text_arena", dataset)
    if not cli.snapshot_every:
        return config
    league = LeagueBuilder(
        pool=pool,
        game=dataset.game,
        opponents=names(cli.league_opponents),
        num_games=cli.league_games,
    )
    return chz.replace(
        config,
        infrequent_evaluator_builders=[*config.infrequent_evaluator_builders, league],
        infrequent_eval_every=cli.snapshot_every,
    )


def names(text: str) -> tuple[str, ...]:
    """Returns the names of a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


async def main(config: CLIConfig) -> None:
    """Trains a model to play."""
    await run(config, build_config(config))


if __name__ == "__main__":
    run_entrypoint(main)
