"""Two-player games with the names of the official cookbook, based on the general environment.

``TwoPlayerEnv`` is a :class:`TextArenaEnv` with two seats, ``TwoPlayerCoordinator`` is its
:class:`Table`. For other numbers of players, opponents and groups use ``text_arena_env``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import chz
import tinker

from tinker_cookbook.completers import MessageCompleter, StopCondition
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import STOP_CONDITION
from tinker_cookbook.recipes.multiplayer_rl.text_arena.table import ILLEGAL_MOVE_REWARD, Table
from tinker_cookbook.recipes.multiplayer_rl.text_arena.text_arena_env import TextArenaEnv
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import OpponentType, make_opponent
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

if TYPE_CHECKING:
    import textarena as ta

__all__ = [
    "ILLEGAL_MOVE_REWARD",
    "STOP_CONDITION",
    "TwoPlayerCoordinator",
    "TwoPlayerEnv",
    "TwoPlayerEnvGroupBuilder",
    "TwoPlayerTextArenaDataset",
    "TwoPlayerTextArenaDatasetBuilder",
]


class TwoPlayerCoordinator(Table):
    """One game of two players; ``shared_env`` is a game of TextArena that has been reset."""

    def __init__(self, shared_env: ta.Env, game: Game | None = None) -> None:
        name = getattr(shared_env, "env_id", "TextArena")
        super().__init__(game or Game(shared_env, GameSettings(game_name=name)), [None, None])
        self.shared_env = shared_env

    @property
    def state(self) -> Any:
        """TextArena's state of the game."""
        return self.game.state

    @property
    def current_player_id(self) -> int:
        """Player who moves next."""
        return self.game.turn

    @property
    def game_done(self) -> bool:
        """Whether the game has ended, by its rules or by an illegal move."""
        return self.over

    @property
    def rewards(self) -> dict | None:
        """Rewards of the game by player, ``None`` before its end."""
        return self.state.rewards

    async def wait_across_env(self, player_id: int) -> None:
        """Waits until ``player_id`` is on turn or the game is over."""
        await self.wait_for_turn(player_id)


@dataclass(eq=False)
class TwoPlayerEnv(TextArenaEnv):
    """One seat of a game of two players, against itself or against ``opponent_policy``."""

    player_id: int
    coordinator: TwoPlayerCoordinator
    self_play: bool
    renderer: Renderer
    opponent_policy: MessageCompleter | None

    def __post_init__(self) -> None:
        if self.self_play != (self.opponent_policy is None):
            raise ConfigurationError(
                f"opponent_policy: got {self.opponent_policy} with self_play={self.self_play}; "
                "expected an opponent without self-play, and none with it"
            )
        if not self.self_play:
            self.coordinator.players[1 - self.player_id] = self.opponent_policy
        super().__init__(self.coordinator, self.player_id, self.renderer)

    @property
    def stop_condition(self) -> StopCondition:
        """TextArena reads a move from square brackets."""
        return STOP_CONDITION

    async def wait_for_turn(self) -> None:
        """Waits for the player's turn or the end; an opponent moves meanwhile."""
        await self.coordinator.start()
        await self.coordinator.wait_for_turn(self.player_id)

    async def opponent_step(self) -> None:
        """Lets the opponent move until the player is on turn."""
        await self.coordinator._play_others()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Makes a move; after the end of the game it only returns that."""
        if self.coordinator.game_done:
            return self.get_done_step()
        return await super().step(action, extra=extra)

    def get_done_step(self) -> StepResult:
        """Returns the result of a step after the end of the game."""
        return StepResult.final(0.0, STOP_CONDITION)

    def compute_reward(self) -> float:
        """Returns the player's reward so far: 0 before the end of the game."""
        return self.coordinator.reward(self.player_id)

    def get_observation(self) -> tinker.ModelInput:
        """Returns the prompt of the player on turn."""
        return super().get_observation()


@dataclass
class TwoPlayerEnvGroupBuilder(EnvGroupBuilder):
    """Pairs of seats: with ``self_play`` both of one game, else one in each of two games."""

    game_name: str
    renderer: Renderer
    num_envs: int
    self_play: bool
    num_players: ClassVar[int] = 2
    opponent_policy: MessageCompleter | None = None

    async def make_envs(self) -> Sequence[Env]:
        """Returns ``num_envs`` seats, alternating between players 0 and 1."""
        if self.num_envs % self.num_players:
            raise ValueError(f"num_envs: got {self.num_envs}, expected an even number of players")
        envs: list[Env] = []
        coordinator: TwoPlayerCoordinator | None = None
        for number in range(self.num_envs):
            # In self-play the second seat joins the game of the first.
            if coordinator is None or number % self.num_players == 0 or not self.self_play:
                coordinator = await asyncio.to_thread(self._start)
            envs.append(
                TwoPlayerEnv(
                    player_id=number % self.num_players,
                    coordinator=coordinator,
                    self_play=self.self_play,
                    renderer=self.renderer,
                    opponent_policy=self.opponent_policy,
                )
            )
        return envs

    def _start(self) -> TwoPlayerCoordinator:
        settings = GameSettings(game_name=self.game_name, num_players=self.num_players)
        game = Game.start(settings, random.randrange(2**31))
        return TwoPlayerCoordinator(game.env, game)


class TwoPlayerTextArenaDataset(RLDataset):
    """The same builder again and again, ``num_datapoints`` seats in all."""

    def __init__(
        self, batch_size: int, builder: TwoPlayerEnvGroupBuilder, num_datapoints: int
    ) -> None:
        for name, value in (("batch_size", batch_size), ("num_datapoints", num_datapoints)):
            if value < 1 or value % builder.num_players:
                raise ConfigurationError(
                    f"{name}: got {value}, expected a positive multiple of the "
                    f"{builder.num_players} players"
                )
        self.batch_size, self.builder, self.num_datapoints = batch_size, builder, num_datapoints

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns one builder for each game of the batch."""
        left = self.num_datapoints - index * self.batch_size
        return [self.builder] * (min(self.batch_size, left) // self.builder.num_players)

    def __len__(self) -> int:
        """Returns the number of whole batches."""
        return self.num_datapoints // self.batch_size


@chz.chz
class TwoPlayerTextArenaDatasetBuilder(RLDatasetBuilder):
    """Self-play to train on, and games against ``test_opponent`` to evaluate on."""

    batch_size: int
    num_train_datapoints: int
    num_test_datapoints: int
    base_url: str | None = None
    model_name: str
    game_name: str
    renderer_name: str
    test_opponent: OpponentType = "base_model"

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a game that cannot start."""
        GameSettings(game_name=self.game_name).check()

    async def __call__(self) -> tuple[TwoPlayerTextArenaDataset, TwoPlayerTextArenaDataset]:
        """Returns the games to train on and to evaluate on."""
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name))
        opponent = await asyncio.to_thread(
            make_opponent,
            self.test_opponent,
            self.model_name,
            renderer,
            self.base_url,
            STOP_CONDITION,
        )
        train = TwoPlayerEnvGroupBuilder(self.game_name, renderer, 2, self_play=True)
        test = TwoPlayerEnvGroupBuilder(
            self.game_name, renderer, 2, self_play=False, opponent_policy=opponent
        )
        return (
            TwoPlayerTextArenaDataset(self.batch_size, train, self.num_train_datapoints),
            TwoPlayerTextArenaDataset(self.num_test_datapoints, test, self.num_test_datapoints),
        )
