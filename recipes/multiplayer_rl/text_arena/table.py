"""A running game with its players: trained seats wait for their turn, others move immediately."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import Game
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import ContextFullError
from tinker_cookbook.renderers import get_text_content

ILLEGAL_MOVE_REWARD = -2.0
"""Reward for an illegal move that ends the game; less than a loss, which is -1."""


class GameAbandonedError(TrainingError):
    """Another player's rollout failed, so the game cannot continue; no player is at fault."""


class Table:
    """One game and who has each seat.

    ``players[i]`` moves for seat i; ``None`` is a seat that ``make_move`` moves for, such as a
    policy in training. Several of those may wait at the same time, in one event loop.
    """

    def __init__(self, game: Game, players: Sequence[MessageCompleter | None]) -> None:
        self.game, self.players = game, list(players)
        self.illegal_player_id: int | None = None
        """Seat whose illegal move ended the game."""
        self.left: int | None = None
        """Seat that reached a limit, such as its model's context, before the end of the game."""
        self.moves = [0] * len(self.players)
        self.illegal = [0] * len(self.players)
        self._error: BaseException | None = None
        self._started = False
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether no one moves any more."""
        return self.game.done or self.illegal_player_id is not None or self.left is not None

    async def start(self) -> None:
        """Lets untrained players move until it is a trained seat's turn."""
        if not self._started:
            self._started = True
            await self._play_others()

    async def wait_for_turn(self, seat: int) -> None:
        """Waits until ``seat`` is on turn or the game is over; raises if it was abandoned."""
        await self._until(lambda: self.over or self.game.turn == seat)

    async def make_move(self, seat: int, text: str) -> None:
        """Makes a move of a trained seat, and the moves of other players until the next trained
        seat.

        Raises:
            ValueError: It is another seat's turn.
        """
        self._raise_if_abandoned()
        if self.over:
            return
        if self.game.turn != seat:
            raise ValueError(f"player {seat}: got a move, expected one of player {self.game.turn}")
        try:
            self._move(text)
            await self._play_others()
        except BaseException as error:
            self._abandon(error)
            raise

    def leave(self, seat: int, failed: bool) -> None:
        """Notifies the others that ``seat`` makes no more moves; no effect after the end."""
        if self.over or self._error is not None:
            return
        if failed:
            self._abandon(GameAbandonedError(f"the rollout of player {seat} failed"))
        else:
            self.left = seat
            self._notify()

    def reward(self, seat: int) -> float:
        """Returns the reward of a seat; 0 if the game has no result for it."""
        if self.illegal_player_id is not None:
            return ILLEGAL_MOVE_REWARD if seat == self.illegal_player_id else 0.0
        return self.game.rewards()[seat] if self.game.done else 0.0

    def outcome(self, seat: int) -> str:
        """Returns "win", "draw" or "loss": the seat's reward compared with the others'."""
        others = [self.reward(other) for other in self.game.chairs if other != seat] or [0.0]
        difference = self.reward(seat) - sum(others) / len(others)
        return "draw" if abs(difference) < 1e-9 else "win" if difference > 0 else "loss"

    def _move(self, text: str) -> None:
        seat = self.game.turn
        legal = self.game.move(text)
        self.moves[seat] += 1
        if not legal:
            self.illegal[seat] += 1
            if self.game.settings.on_illegal == "end":
                self.illegal_player_id = seat
        self._notify()

    async def _play_others(self) -> None:
        while not self.over and (player := self.players[self.game.turn]) is not None:
            seat = self.game.turn
            try:
                answer = await player([{"role": "user", "content": self.game.observe()}])
            except ContextFullError:
                # No fault of the trained seats: the game has no result, as if one of them left.
                self.leave(seat, failed=False)
                return
            # The seat of a trained player may have left meanwhile.
            if not self.over:
                self._move(get_text_content(answer))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._raise_if_abandoned()
            if condition():
                return
            await self._changed.wait()

    def _notify(self) -> None:
        # A new event for later waiters; waiters of the old event check their condition again.
        self._changed.set()
        self._changed = asyncio.Event()

    def _abandon(self, error: BaseException) -> None:
        self._error = error
        self._notify()

    def _raise_if_abandoned(self) -> None:
        if self._error is not None:
            raise GameAbandonedError(
                f"{self.game.settings.game_name}: another player's rollout failed, so the game was "
                f"abandoned ({type(self._error).__name__}: {self._error})"
            )
