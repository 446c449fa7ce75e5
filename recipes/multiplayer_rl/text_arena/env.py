"""Games of TextArena as environments: any game, number of seats, and combination of players.

One environment is one trained seat of one game. Trained seats of the same game are members of one
group and wait for each other; all games of a batch advance together, so that their moves are
sampled in shared batches. The names with ``TwoPlayer`` are those of the official cookbook.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import chz

from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.completers import (
    MessageCompleter,
    StopCondition,
    TinkerTokenCompleter,
    derived_seed,
)
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.multiplayer_rl.fixed_model import FixedModel
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import (
    ILLEGAL_MOVE_REWARD as ILLEGAL_MOVE_REWARD,  # a name of the original
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import (
    STOP_CONDITION,
    Game,
    GameSettings,
    OpenPlayer,
)
from tinker_cookbook.recipes.multiplayer_rl.text_arena.pool import snapshots
from tinker_cookbook.recipes.multiplayer_rl.text_arena.tictactoe import (
    BY_RULES,
    ModelPlayer,
    OpponentType,
)
from tinker_cookbook.renderers import Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopReason,
    Trajectory,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.training.config import BackendSettings
from tinker_cookbook.utils import logtree

OPPONENTS = ("self", "pool", "random", "optimal", "base_model")
TwoPlayerCoordinator = Game


class TextArenaEnv(Env):
    """One trained seat of one game.

    Each prompt is one user message: the seat's observations of the game so far. The reward comes at
    the end of the game; metrics are ``win``, ``draw``, ``loss``, ``illegal_move``, ``moves`` and
    ``unfinished``. ``stop`` ends a move; empty: the renderer's stop sequences.
    """

    def __init__(
        self, player_id: int, coordinator: Game, renderer: Renderer, stop: StopCondition | None
    ) -> None:
        self.player_id, self.coordinator, self.renderer = player_id, coordinator, renderer
        self.stop_condition = stop or renderer.get_stop_sequences()

    @property
    def waits_for_members(self) -> bool:  # type: ignore[override]
        """Whether another trained seat moves first."""
        others = self.coordinator.players.count(None) > 1
        return others and self.coordinator.current_player_id != self.player_id

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Waits for the first turn; an episode without a turn has the game's reward."""
        await self.coordinator.wait_across_env(self.player_id)
        if self.coordinator.game_done:
            # The others ended the game before this seat could move.
            completed = {f"stop/{StopReason.COMPLETED}": 1}
            return InitialObservationOverflow(
                self.compute_reward(), {**completed, **self._metrics()}
            )
        return self.get_observation(), self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Makes a move, and waits for the next turn or the end of the game."""
        game, seat = self.coordinator, self.player_id
        move, before = get_text_content(self.renderer.parse_response(action)[0]), game.illegal[seat]
        await game.make_move(seat, move)
        legal = "illegal move" if game.illegal[seat] > before else "move"
        logtree.log_text(f"player {seat}: {legal} {move!r}")
        await game.wait_across_env(seat)
        if game.game_done:
            logs = {"outcome": game.outcome(seat)}
            return StepResult.final(self.compute_reward(), self.stop_condition, logs=logs)
        return StepResult(0.0, False, self.get_observation(), self.stop_condition)

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
        """Returns metrics of the whole game; its reward came with the last step."""
        return 0.0, self._metrics()

    def rollout_ended(self, failed: bool) -> None:
        """Ends the game for the others if this seat cannot go on."""
        self.coordinator.leave(failed)

    def compute_reward(self) -> float:
        """Returns the player's reward so far: 0 before the end of the game."""
        return self.coordinator.reward(self.player_id)

    def get_observation(self) -> Observation:
        """Returns the prompt of the seat on turn."""
        text = self.coordinator.observe()
        return self.renderer.build_generation_prompt([{"role": "user", "content": text}])

    def _metrics(self) -> Metrics:
        game, seat = self.coordinator, self.player_id
        over, outcome = game.game_done, game.outcome(seat)
        return {
            **{name: float(over and outcome == name) for name in ("win", "draw", "loss")},
            "illegal_move": float(game.illegal[seat] > 0),
            "moves": game.moves[seat],
            "unfinished": float(game.left or not over),
        }


class TwoPlayerEnv(TextArenaEnv):
    """One seat of a game of two players, against itself or against ``opponent_policy``."""

    def __init__(
        self,
        player_id: int,
        coordinator: Game,
        self_play: bool,
        renderer: Renderer,
        opponent_policy: MessageCompleter | None,
    ) -> None:
        if opponent_policy is not None:
            coordinator.players[1 - player_id] = opponent_policy
        super().__init__(player_id, coordinator, renderer, STOP_CONDITION)


def trained(seed: int) -> None:
    """The player of a trained seat."""
    return None


@dataclass
class TextArenaGroupBuilder(EnvGroupBuilder):
    """Games with the same players and, with ``same_start``, the same cards.

    Attributes:
        players: One function for each seat, which returns its player in a game; ``trained`` is a
            trained seat. The members are the trained seats of the first game, then those of the
            second, …
        seed_path: All random numbers of the games depend on it.
        same_start: Start all games of the group alike, so that the rewards of its members differ
            by their moves and not by their cards.
        rotate: Move the players on by one seat with each game.
    """

    role_baseline: ClassVar[bool] = True
    """Compare a member with the members of its own seat. A seat that wins more often by the rules
    of the game would otherwise be reinforced for that."""

    game: GameSettings
    players: Sequence[OpenPlayer]
    renderer: Renderer
    num_games: int
    seed_path: tuple[int, ...] = (0,)
    stop: StopCondition | None = field(default_factory=lambda: list(STOP_CONDITION))
    tags: Sequence[str] = ()
    same_start: bool = True
    rotate: bool = False
    _seats: int = field(default=1, repr=False)
    _attempts: Counter[int] = field(default_factory=Counter, repr=False)
    _retried: dict[tuple[int, int], list[TextArenaEnv]] = field(default_factory=dict, repr=False)

    async def make_envs(self) -> Sequence[TextArenaEnv]:
        """Returns the trained seats of all games."""
        # In a thread: it may load a model, and some games take a while to set up.
        games = await asyncio.to_thread(lambda: [self._start(n) for n in range(self.num_games)])
        self._seats = len(games[0])
        return [env for game in games for env in game]

    async def make_env(self, index: int) -> TextArenaEnv:
        """Returns the seat of a retry: seats of one game fail and are retried together."""
        number, place = divmod(index, self._seats)
        self._attempts[index] += 1
        key = number, self._attempts[index]
        if key not in self._retried:
            self._retried[key] = self._start(*key)
        return self._retried[key][place]

    def _start(self, number: int, attempt: int = 0) -> list[TextArenaEnv]:
        """Starts game ``number`` of the group and returns its trained seats."""
        players = list(self.players)
        if self.rotate and (shift := number % len(players)):
            players = players[-shift:] + players[:-shift]
        path = self.seed_path if self.same_start else (*self.seed_path, number)
        seed = derived_seed(*path)
        game = Game.start(self.game, seed)
        # Games that start alike have players with other random numbers.
        game.players = [
            opened(derived_seed(seed, number, attempt, seat))
            for seat, opened in zip(range(game.num_players), players, strict=True)
        ]
        return [
            TextArenaEnv(seat, game, self.renderer, self.stop)
            for seat, player in enumerate(game.players)
            if player is None
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Moves the mean reward of each seat to the mean of the group (``role_baseline``).

        The mean of all rewards stays the same. Advantages are then relative to the member's seat.
        """
        rewards = [trajectory.reward for trajectory in trajectory_group]
        seats = [env.player_id if isinstance(env, TextArenaEnv) else 0 for env in env_group]
        if not self.role_baseline or len(set(seats)) < 2:
            return [(0.0, {}) for _ in trajectory_group]
        of_seat = {s: [r for r, t in zip(rewards, seats, strict=True) if s == t] for s in seats}
        mean = sum(rewards) / len(rewards)
        return [(mean - sum(of_seat[seat]) / len(of_seat[seat]), {}) for seat in seats]

    def logging_tags(self) -> list[str]:
        """Returns the tags."""
        return list(self.tags)


class TwoPlayerEnvGroupBuilder(TextArenaGroupBuilder):
    """Pairs of seats: with ``self_play`` both of one game, else one in each of two games."""

    num_players = 2
    role_baseline = False

    def __init__(
        self,
        game_name: str,
        renderer: Renderer,
        num_envs: int,
        self_play: bool,
        opponent_policy: MessageCompleter | None = None,
    ) -> None:
        other: OpenPlayer = trained if self_play else partial(_given, opponent_policy)
        super().__init__(
            GameSettings(game_name=game_name, num_players=2),
            [trained, other],
            renderer,
            num_games=num_envs // 2 if self_play else num_envs,
            same_start=False,
            rotate=not self_play,
        )

    async def make_envs(self) -> Sequence[TextArenaEnv]:
        """Returns the trained seats of new games."""
        self.seed_path = (random.randrange(2**31),)
        return await super().make_envs()


def _given(player: MessageCompleter | None, seed: int) -> MessageCompleter | None:
    return player


class TwoPlayerTextArenaDataset(RLDataset):
    """The same builder again and again, ``num_datapoints`` seats in all."""

    def __init__(
        self, batch_size: int, builder: TwoPlayerEnvGroupBuilder, num_datapoints: int
    ) -> None:
        self.batch_size, self.builder, self.num_datapoints = batch_size, builder, num_datapoints

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns one builder for each game of the batch."""
        left = self.num_datapoints - index * self.batch_size
        return [self.builder] * (min(self.batch_size, left) // self.builder.num_players)

    def __len__(self) -> int:
        """Returns the number of whole batches."""
        return self.num_datapoints // self.batch_size


@chz.chz
class TextArenaDatasetBuilder(GameSettings, BackendSettings, SamplerOptions, RLDatasetBuilder):
    """Games of any number of players.

    The groups of a batch play against ``opponents`` in turn: ``self`` (the policy has every seat,
    all of them trained), ``pool`` (an earlier snapshot of the run has the other seats), ``random``,
    ``optimal`` or ``base_model``. Each group trains one seat, except in self-play, and the seats
    change from group to group.
    """

    model_name: str = chz.field(doc="Base model of the run")
    renderer_name: str = chz.field(doc="Its chat format")
    batch_size: int = chz.field(doc="Trained seats per step")
    group_size: int = chz.field(default=2, doc="Trained seats that are compared with each other")
    num_train_datapoints: int = chz.field(doc="Trained seats per epoch")
    num_test_datapoints: int = chz.field(doc="Games of an evaluation; 0: no evaluation")
    opponents: tuple[str, ...] = chz.field(
        default=("self",),
        doc=f"Opponents, used by the groups in rotation: {', '.join(OPPONENTS)}",
    )
    test_opponent: OpponentType = chz.field(default="base_model", doc="Opponent in evaluation")
    log_path: str = chz.field(default="", doc="Folder of the run, which has the pool")
    pool_size: int = chz.field(
        default=20, doc="Snapshots to play against: the first and the newest ones"
    )
    max_tokens: int = chz.field(default=64, doc="Maximum tokens of a move")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature of opponents")
    stop_condition: tuple[str, ...] = chz.field(
        default=tuple(STOP_CONDITION), doc="Text that ends a move"
    )
    seed: int = chz.field(default=0, doc="Seed of the games")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a setting that cannot work."""
        seats = self.seats
        for name in self.opponents:
            if name not in OPPONENTS or (seats == 1 and name != "self"):
                raise ConfigurationError(
                    f"opponents: got {name!r}, expected some of {', '.join(OPPONENTS)}, and only "
                    f"self in a game for one player{nearest(name, OPPONENTS)}"
                )
        if "optimal" in (*self.opponents, self.test_opponent) and "TicTac" not in self.game_name:
            raise ConfigurationError(
                f"opponents, test_opponent: got 'optimal' for {self.game_name}, expected it for "
                "TicTacToe only; use random or base_model"
            )
        if self.group_size < 2 or self.group_size % seats:
            raise ConfigurationError(
                f"group_size: got {self.group_size}, expected a multiple of the {seats} seats of "
                f"{self.game_name}, and at least 2"
            )
        if self.batch_size < 1 or self.batch_size % self.group_size:
            raise ConfigurationError(
                f"batch_size: got {self.batch_size}, expected a multiple of group_size="
                f"{self.group_size}"
            )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the games to train on and to evaluate on."""
        await asyncio.to_thread(self.check)
        seats = await asyncio.to_thread(lambda: self.seats)
        train = TextArenaDataset(self, seats, max(1, self.num_train_datapoints // self.batch_size))
        if not self.num_test_datapoints or seats == 1:
            return train, None
        return train, ProblemDataset([seats], self.evaluation, 1, shuffle=False)

    def evaluation(self, seats: int) -> EnvGroupBuilder:
        """Returns games against the test opponent: each seat equally often, each game another
        start."""
        other = partial(self.open, self.test_opponent, ())
        players = [trained, *[other] * (seats - 1)]
        games = self.num_test_datapoints
        return self.group(players, games, 1, same_start=False, rotate=True)

    def group(
        self, players: Sequence[OpenPlayer], num_games: int, *path: int, **more: Any
    ) -> TextArenaGroupBuilder:
        """Returns a group of games; their random numbers depend on ``path``."""
        game = GameSettings(**{name: getattr(self, name) for name in chz.chz_fields(GameSettings)})
        renderer, stop = _renderer(self.renderer_name, self.model_name), list(self.stop_condition)
        path = (self.seed, *path)
        return TextArenaGroupBuilder(game, players, renderer, num_games, path, stop, **more)

    def open(self, opponent: str, place: tuple[int, ...], seed: int) -> MessageCompleter:
        """Returns a player with fixed weights or rules; may load a model.

        The snapshot of ``pool`` depends only on the seed and on ``place`` (batch and group), so a
        run that was killed and resumed gets the same opponents.
        """
        if opponent in BY_RULES:
            return BY_RULES[opponent](seed)
        path = None
        if opponent == "pool":
            members = snapshots(self.log_path, place[0], self.pool_size)
            path = members[derived_seed(self.seed, *place) % len(members)]
        fields = {
            name: getattr(self, name) for name in chz.chz_fields(FixedModel) if name != "model_path"
        }
        client = FixedModel(**fields, model_path=path).client()
        policy = TinkerTokenCompleter(client, self.max_tokens, self.temperature, seed=seed)
        renderer = _renderer(self.renderer_name, self.model_name)
        return ModelPlayer(policy, renderer, list(self.stop_condition))


TwoPlayerTextArenaDatasetBuilder = TextArenaDatasetBuilder


@lru_cache(maxsize=8)
def _renderer(renderer_name: str, model_name: str) -> Renderer:
    return get_renderer(renderer_name, get_tokenizer(model_name))


@dataclass
class TextArenaDataset(RLDataset):
    """Batches of groups to train on."""

    builder: TextArenaDatasetBuilder
    seats: int
    num_batches: int
    epoch: int = 0

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Returns the groups of batch ``index`` of the epoch."""
        groups = self.builder.batch_size // self.builder.group_size
        # Counted over epochs, because the pool has more members later on.
        batch = self.epoch * len(self) + index
        return [self._group(batch, number, batch * groups + number) for number in range(groups)]

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self.num_batches

    def set_epoch(self, seed: int) -> None:
        """Sets the epoch: the loop passes its own seed plus the number of the epoch."""
        self.epoch = seed - self.builder.seed

    def _group(self, batch: int, number: int, turn: int) -> EnvGroupBuilder:
        settings, seats = self.builder, self.seats
        # The rotation continues across batches; otherwise small batches would miss an opponent.
        opponent = settings.opponents[turn % len(settings.opponents)]
        if opponent == "self":
            players: list[OpenPlayer] = [trained] * seats
        else:
            own = turn // len(settings.opponents) % seats
            other = partial(settings.open, opponent, (batch, number))
            players = [trained if seat == own else other for seat in range(seats)]
        num_games = settings.group_size // players.count(trained)
        return settings.group(players, num_games, 0, batch, number, tags=[opponent])
