"""Environments of TextArena: any game, number of seats, and combination of players.

One environment is one trained seat of one game. Trained seats of the same game are members of one
group and wait for each other; all games of a batch advance together, so that their moves are
sampled in shared batches.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinker_cookbook.completers import MessageCompleter, StopCondition, derived_seed
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game, GameSettings
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import STOP_CONDITION, seat
from tinker_cookbook.recipes.multiplayer_rl.text_arena.table import Table
from tinker_cookbook.renderers import Renderer, get_text_content
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Observation,
    StepResult,
    StopReason,
    Trajectory,
)
from tinker_cookbook.utils import logtree

if TYPE_CHECKING:
    from collections.abc import Iterable

OpenPlayer = Callable[[], "MessageCompleter | None"]
"""Returns the player of a seat, ``None`` for a trained seat; may load a model."""


class TextArenaEnv(Env):
    """One trained seat of one game.

    Each prompt is one user message: the seat's observations of the game so far. The reward comes at
    the end of the game; metrics are ``win``, ``draw``, ``loss``, ``illegal_move``, ``moves`` and
    ``unfinished``.
    """

    def __init__(
        self, table: Table, seat: int, renderer: Renderer, stop: StopCondition | None = None
    ) -> None:
        self.table, self.seat, self.renderer = table, seat, renderer
        self._stop = list(STOP_CONDITION) if stop is None else stop

    @property
    def waits_for_members(self) -> bool:  # type: ignore[override]
        """Whether another trained seat moves first."""
        trained = [seat for seat, player in enumerate(self.table.players) if player is None]
        return len(trained) > 1 and self.table.game.turn != self.seat

    @property
    def stop_condition(self) -> StopCondition:
        """Ends a move: ``STOP_CONDITION``, or the renderer's if that is empty."""
        return self._stop or self.renderer.get_stop_sequences()

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Waits for the first turn; an episode without a turn has the game's reward."""
        await self.table.start()
        await self.table.wait_for_turn(self.seat)
        if self.table.over:
            # The others ended the game before this seat could move.
            completed = {f"stop/{StopReason.COMPLETED}": 1}
            return InitialObservationOverflow(
                self.table.reward(self.seat), {**completed, **self._metrics()}
            )
        return self.get_observation(), self.stop_condition

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Makes a move, and waits for the next turn or the end of the game."""
        message, _ = self.renderer.parse_response(action)
        move = get_text_content(message)
        before = self.table.illegal[self.seat]
        await self.table.make_move(self.seat, move)
        legal = "illegal move" if self.table.illegal[self.seat] > before else "move"
        logtree.log_text(f"player {self.seat}: {legal} {move!r}")
        await self.table.wait_for_turn(self.seat)
        if self.table.over:
            return StepResult.final(
                self.table.reward(self.seat),
                self.stop_condition,
                logs={"outcome": self.table.outcome(self.seat)},
            )
        return StepResult(0.0, False, self.get_observation(), self.stop_condition)

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
        """Returns metrics of the whole game; its reward came with the last step."""
        return 0.0, self._metrics()

    def rollout_ended(self, failed: bool) -> None:
        """Ends the game for the others if this seat cannot go on."""
        self.table.leave(self.seat, failed)

    def get_observation(self) -> Observation:
        """Returns the prompt of the seat on turn."""
        text = self.table.game.observe()
        return self.renderer.build_generation_prompt([{"role": "user", "content": text}])

    def _metrics(self) -> Metrics:
        over, outcome = self.table.over, self.table.outcome(self.seat)
        return {
            **{name: float(over and outcome == name) for name in ("win", "draw", "loss")},
            "illegal_move": float(self.table.illegal[self.seat] > 0),
            "moves": self.table.moves[self.seat],
            "unfinished": float(
                not (self.table.game.done or self.table.illegal_player_id is not None)
            ),
        }


@dataclass
class TextArenaGroupBuilder(EnvGroupBuilder):
    """Games with the same players and, with ``same_start``, the same cards.

    Attributes:
        seats: One function for each seat, which returns its player; ``None`` from it is a trained
            seat. The members are the trained seats of the first game, then those of the second, …
        seed_path: All random numbers of the games depend on it.
        same_start: Start all games of the group alike, so that the rewards of its members differ
            by their moves and not by their cards.
        role_baseline: Compare a member with the members of its own seat. A seat that wins more
            often by the rules of the game would otherwise be reinforced for that.
    """

    game: GameSettings
    seats: Sequence[OpenPlayer]
    renderer: Renderer
    num_games: int
    seed_path: tuple[int, ...] = (0,)
    stop: StopCondition | None = None
    tags: Sequence[str] = ()
    same_start: bool = True
    role_baseline: bool = True
    _attempts: Counter[int] = field(default_factory=Counter, repr=False)
    _retried: dict[tuple[int, int], list[TextArenaEnv]] = field(default_factory=dict, repr=False)

    async def make_envs(self) -> Sequence[TextArenaEnv]:
        """Returns the trained seats of all games."""
        # In a thread: it may load a model, and some games take a while to set up.
        return await asyncio.to_thread(self._make_envs)

    def _make_envs(self) -> Sequence[TextArenaEnv]:
        players = [open_player() for open_player in self.seats]
        envs = [env for number in range(self.num_games) for env in self._sit(number, 0, players)]
        if not envs:
            raise ConfigurationError(
                f"seats: got no trained seat in {len(self.seats)} seats, expected at least one"
            )
        return envs

    async def make_env(self, index: int) -> TextArenaEnv:
        """Returns the seat of a retry: seats of one game fail and are retried together."""
        players = await asyncio.to_thread(lambda: [open_player() for open_player in self.seats])
        trained = sum(player is None for player in players)
        number, place = divmod(index, trained)
        self._attempts[index] += 1
        key = number, self._attempts[index]
        if key not in self._retried:
            self._retried[key] = self._sit(number, key[1], players)
        return self._retried[key][place]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Moves the mean reward of each seat to the mean of the group (``role_baseline``).

        The mean of all rewards stays the same. Advantages are then relative to the member's seat.
        """
        rewards = [trajectory.reward for trajectory in trajectory_group]
        seats = [env.seat if isinstance(env, TextArenaEnv) else 0 for env in env_group]
        if not self.role_baseline or len(set(seats)) < 2:
            return [(0.0, {}) for _ in trajectory_group]
        means = {
            seat: _mean(r for r, s in zip(rewards, seats, strict=True) if s == seat)
            for seat in seats
        }
        overall = _mean(rewards)
        return [(overall - means[seat], {}) for seat in seats]

    def logging_tags(self) -> list[str]:
        """Returns the tags."""
        return list(self.tags)

    def _sit(
        self, number: int, attempt: int, players: Sequence[MessageCompleter | None]
    ) -> list[TextArenaEnv]:
        """Starts game ``number`` of the group and returns its trained seats."""
        again = (attempt,) if attempt else ()
        start = derived_seed(*self.seed_path, *(() if self.same_start else (number,)))
        game = Game.start(self.game, start)
        if len(game.chairs) != len(players):
            raise ConfigurationError(
                f"seats: got {len(players)} players, but {self.game.game_name} starts with "
                f"{len(game.chairs)}; expected one for each seat"
            )
        seated = [
            None if player is None else seat(player, *self.seed_path, number, i, *again)
            for i, player in enumerate(players)
        ]
        table = Table(game, seated)
        return [
            TextArenaEnv(table, i, self.renderer, self.stop)
            for i, player in enumerate(seated)
            if player is None
        ]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
