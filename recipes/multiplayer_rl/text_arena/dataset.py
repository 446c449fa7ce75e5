"""Batches of games: self-play, games against the opponent pool, and against fixed players."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import chz

from tinker_cookbook.completers import MessageCompleter, StopCondition, derived_seed
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import RandomOpponent
from tinker_cookbook.recipes.multiplayer_rl.text_arena.pool import (
    Pool,
    PoolSettings,
    optimal_opponent,
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.text_arena_env import (
    OpenPlayer,
    TextArenaGroupBuilder,
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import BaseModel, OpponentType
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

OPPONENTS = ("self", "pool", "random", "optimal", "base_model")


def trained() -> None:
    """The player of a trained seat."""
    return None


@chz.chz
class TextArenaDatasetBuilder(RLDatasetBuilder):
    """Games of any number of players.

    The groups of a batch play against ``opponents`` in turn: ``self`` (the policy has every seat,
    all of them trained), ``pool`` (an earlier snapshot has the other seats), ``random``,
    ``optimal`` or ``base_model``. Each group trains one seat, except in self-play, and the seats
    change from group to group.
    """

    game: GameSettings = chz.field(doc="The game")
    pool: PoolSettings = chz.field(doc="How earlier weights play")
    opponents: tuple[str, ...] = chz.field(
        default=("self", "pool"),
        doc=f"Opponents, used by the groups in rotation: {', '.join(OPPONENTS)}",
    )
    batch_size: int = chz.field(default=512, doc="Trained seats per step")
    group_size: int = chz.field(default=16, doc="Trained seats that are compared with each other")
    num_batches: int = chz.field(default=80, doc="Steps per epoch")
    test_opponent: OpponentType = chz.field(default="base_model", doc="Opponent in evaluation")
    num_test: int = chz.field(default=128, doc="Games of an evaluation; 0: no evaluation")
    seed: int = chz.field(default=0, doc="Seed of the games")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a setting that cannot work."""
        self.game.check()
        seats = self.game.seats
        for name in self.opponents:
            if name not in OPPONENTS:
                raise ConfigurationError(
                    f"opponents: got {name!r}, expected some of {', '.join(OPPONENTS)}"
                    f"{nearest(name, OPPONENTS)}"
                )
            if seats == 1 and name != "self":
                raise ConfigurationError(
                    f"opponents: got {name!r}, but {self.game.game_name} has one player; expected "
                    "self"
                )
        if self.group_size < 2 or self.group_size % seats:
            raise ConfigurationError(
                f"group_size: got {self.group_size}, expected a multiple of the {seats} seats of "
                f"{self.game.game_name}, and at least 2"
            )
        if self.batch_size < 1 or self.batch_size % self.group_size:
            raise ConfigurationError(
                f"batch_size: got {self.batch_size}, expected a multiple of group_size="
                f"{self.group_size}"
            )
        for name, low in (("num_batches", 1), ("num_test", 0)):
            if getattr(self, name) < low:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)}, expected at least {low}"
                )
        if "optimal" in (*self.opponents, self.test_opponent):
            optimal_opponent(self.game.game_name)

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the games to train on and to evaluate on."""
        await asyncio.to_thread(self.check)
        renderer = get_renderer(self.pool.renderer_name, get_tokenizer(self.pool.model_name))
        seats = await asyncio.to_thread(lambda: self.game.seats)
        train = TextArenaDataset(self, renderer, seats)
        if not self.num_test or seats == 1:
            return train, None
        return train, TextArenaTestSet(self, renderer, seats)

    def player(self, opponent: str) -> MessageCompleter:
        """Returns a player with fixed weights or rules; may load a model."""
        if opponent == "random":
            return RandomOpponent(self.seed)
        if opponent == "optimal":
            return optimal_opponent(self.game.game_name, self.seed)
        return self.pool.pool().model_player(BaseModel.of(self.pool).client())

    def stop(self) -> StopCondition:
        """Returns what ends a move; empty: the renderer's stop sequences."""
        return list(self.pool.stop_condition)


@dataclass
class TextArenaDataset(RLDataset):
    """Batches of groups to train on."""

    builder: TextArenaDatasetBuilder
    renderer: Renderer
    seats: int
    epoch: int = 0

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of batch ``index`` of the epoch."""
        groups = self.builder.batch_size // self.builder.group_size
        # Counted over epochs, because the pool has more members later on.
        batch = self.epoch * len(self) + index
        return [self._group(batch, number) for number in range(groups)]

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self.builder.num_batches

    def set_epoch(self, seed: int) -> None:
        """Sets the epoch: the loop passes its own seed plus the number of the epoch."""
        self.epoch = seed - self.builder.seed

    def _group(self, batch: int, number: int) -> TextArenaGroupBuilder:
        settings = self.builder
        # The rotation continues across batches; otherwise small batches would miss an opponent.
        turn = batch * (settings.batch_size // settings.group_size) + number
        opponent = settings.opponents[turn % len(settings.opponents)]
        path = (settings.seed, 0, batch, number)
        if opponent == "self":
            seats: list[OpenPlayer] = [trained] * self.seats
        else:
            if opponent == "pool":
                other: OpenPlayer = partial(from_pool, settings.pool, batch, number)
            else:
                other = partial(settings.player, opponent)
            own = turn // len(settings.opponents) % self.seats
            seats = [trained if seat == own else other for seat in range(self.seats)]
        return TextArenaGroupBuilder(
            settings.game,
            seats,
            self.renderer,
            num_games=settings.group_size // seats.count(trained),
            seed_path=path,
            stop=settings.stop(),
            tags=[opponent],
        )


@dataclass
class TextArenaTestSet(RLDataset):
    """Games against the test opponent: each seat equally often, every game another start."""

    builder: TextArenaDatasetBuilder
    renderer: Renderer
    seats: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns one group for each seat."""
        settings = self.builder
        other = partial(settings.player, settings.test_opponent)
        return [
            TextArenaGroupBuilder(
                settings.game,
                [trained if seat == own else other for seat in range(self.seats)],
                self.renderer,
                num_games=max(1, settings.num_test // self.seats),
                seed_path=(settings.seed, 1, own),
                stop=settings.stop(),
                tags=[f"seat_{own}"],
                same_start=False,
            )
            for own in range(self.seats)
        ]

    def __len__(self) -> int:
        """Returns 1."""
        return 1


def from_pool(settings: PoolSettings, step: int, number: int) -> MessageCompleter:
    """Returns a snapshot of the first ``step`` updates as player; it opens its weights."""
    pool: Pool = settings.pool()
    player = pool.choose(step, derived_seed(settings.seed, number))
    if player is None:
        raise ConfigurationError(
            f"opponents: got 'pool', but no snapshot was saved before step {step}; expected "
            "snapshot_every above 0"
        )
    return player
