"""A game of TextArena with its players, who wait for their turns.

    python -m recipes.multiplayer_rl.text_arena.games    # each game, or why it does not start here

TextArena uses Python's global random generator, so two games that run at the same time would change
each other's cards. Here each game has its own state of the generator, which is active only while
the game computes. So a game depends only on its seed and its moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import random
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import chz

from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataValidationError,
    TrainingError,
    nearest_sentence,
)
from tinker_cookbook.renderers import get_text_content
from tinker_cookbook.utils.imports import missing_extra

if TYPE_CHECKING:
    import textarena as ta

STOP_CONDITION: list[str] = ["]\n"]
"""A move is the first text in square brackets, so an answer may end after it."""
ILLEGAL_MOVE_REWARD = -2.0
"""Reward for an illegal move that ends the game; less than a loss, which is -1."""
_SEATS_TO_TRY = (2, 1, 3, 4, 5, 6, 7, 8)
_generator = threading.RLock()


class GameError(TrainingError):
    """A game raised an error; the message contains the move that caused it."""


class GameAbandonedError(TrainingError):
    """Another player's rollout failed, so the game cannot continue; no player is at fault."""


def _registry() -> dict[str, Any]:
    try:
        return importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    except ImportError as error:
        raise missing_extra("games of TextArena", error, "multiplayer-rl") from error


@chz.chz
class GameSettings:
    """Name and arguments of a game, and how it is shown."""

    game_name: str = chz.field(
        default="TicTacToe-v0", doc="Name of the game in TextArena's registry"
    )
    game_options: dict[str, Any] = chz.field(
        default_factory=dict, doc="Arguments of the game: game_options.max_rounds=1"
    )
    num_players: int | None = chz.field(
        default=None, doc="Number of seats; default: the smallest possible number, at least 2"
    )
    show_rules: bool = chz.field(
        default=True, doc="Show the rules in each prompt; False: for a model that knows them"
    )
    on_illegal: Literal["end", "game"] = chz.field(
        default="end",
        doc="end: an illegal move ends the game; game: the game handles it, often with a retry",
    )

    @property
    def seats(self) -> int:
        """Number of players; raises ``ConfigurationError`` if the game cannot start here."""
        return Game.start(self, seed=0).num_players


class Game:
    """One game in progress, with its own random numbers and its players.

    ``players[i]`` moves for seat i; ``None`` is a seat that ``make_move`` moves for, such as a
    policy in training. Several of those may wait at the same time, in one event loop.
    ``settings`` say how it is shown; ``random_state`` is the state of its random numbers (default:
    of the global generator).
    """

    def __init__(
        self, shared_env: ta.Env, settings: GameSettings | None = None, random_state: Any = None
    ) -> None:
        self.shared_env, self.settings = shared_env, settings or GameSettings()
        self._random = random.getstate() if random_state is None else random_state
        self.num_players = int(self.state.num_players)
        self.players: list[MessageCompleter | None] = [None] * self.num_players
        self.illegal_player_id: int | None = None
        """Seat whose illegal move ended the game."""
        self.left = False
        """Whether a seat reached a limit, such as its model's context, before the end."""
        self.moves, self.illegal = [0] * self.num_players, [0] * self.num_players
        self._error: BaseException | None = None
        self._started = False
        self._changed = asyncio.Event()

    @classmethod
    def start(cls, settings: GameSettings, seed: int) -> Game:
        """Starts a game; raises ``ConfigurationError`` if it cannot start here."""
        name, outer = settings.game_name, random.getstate()
        if name not in _registry():
            raise ConfigurationError(
                f"game_name: got {name!r}, which TextArena does not have"
                f"{nearest_sentence(name, sorted(_registry()))}"
                " All names: python -m recipes.multiplayer_rl.text_arena.games"
            )
        size = settings.num_players or _size(name)
        try:
            # Some games print while they set up the board.
            with _generator, contextlib.redirect_stdout(io.StringIO()):
                random.seed(seed)
                env = importlib.import_module("textarena").make(name, **settings.game_options)
                env.reset(num_players=size, seed=seed)
                return cls(env, settings, random.getstate())
        # Games raise assertions for a wrong number of players, and anything for missing data.
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise ConfigurationError(
                f"game_name: {name} cannot start with num_players={size} and game_options="
                f"{settings.game_options} ({type(error).__name__}: {text}); expected another game, "
                "number of players or other options"
            ) from error
        finally:
            random.setstate(outer)

    @property
    def state(self) -> Any:
        """TextArena's state of the game."""
        return self.shared_env.state  # type: ignore[attr-defined]

    @property
    def current_player_id(self) -> int:
        """Seat that moves next."""
        return int(self.state.current_player_id)

    @property
    def game_done(self) -> bool:
        """Whether no one moves any more."""
        return bool(self.state.done) or self.illegal_player_id is not None or self.left

    @property
    def rewards(self) -> dict[int, float] | None:
        """Rewards of the game by player, ``None`` before its end."""
        return self.state.rewards

    def observe(self) -> str:
        """Returns what the seat to move sees: the whole history, as the game's wrappers show it."""
        with self._own_random("observation"):
            seat, text = self.shared_env.get_observation()
        text = str(text)
        if not self.settings.show_rules:
            kind = importlib.import_module("textarena").ObservationType.PROMPT
            # Each wrapper passes attributes of the game on; the history is the outermost one's.
            for _, rules, found in getattr(self.shared_env, "full_observations", {}).get(seat, []):
                if found == kind:
                    text = text.replace(f"[GAME] {rules}", "").replace(rules, "")
        return text.strip()

    def move(self, text: str) -> bool:
        """Makes a move of the seat on turn; returns whether the game accepted it as legal."""
        seat, errors = self.current_player_id, int(getattr(self.state, "error_count", 0))
        with self._own_random(f"move {text!r} of player {seat}"):
            self.shared_env.step(text)
        info = (getattr(self.state, "game_info", None) or {}).get(seat, {})
        legal = getattr(self.state, "error_count", 0) <= errors and not info.get("invalid_move")
        self.moves[seat] += 1
        if not legal:
            self.illegal[seat] += 1
            if self.settings.on_illegal == "end":
                self.illegal_player_id = seat
        self._notify()
        return legal

    async def make_move(self, player_id: int, move: str) -> None:
        """Makes a move of a trained seat, and the moves of players until the next trained seat."""
        self._raise_if_abandoned()
        if self.game_done:
            return
        if self.current_player_id != player_id:
            raise ValueError(
                f"player {player_id}: got a move, expected one of player {self.current_player_id}"
            )
        try:
            self.move(move)
            await self.play_others()
        except BaseException as error:
            self._abandon(error)
            raise

    async def play_others(self) -> None:
        """Lets untrained players move until it is a trained seat's turn."""
        self._started = True
        while not self.game_done and (player := self.players[self.current_player_id]) is not None:
            try:
                answer = await player([{"role": "user", "content": self.observe()}])
            except DataValidationError:
                # No room in the context of the player's model is no fault of the trained seats:
                # the game has no result, as if one of them left.
                self.leave(failed=False)
                return
            # The seat of a trained player may have left meanwhile.
            if not self.game_done:
                self.move(get_text_content(answer))

    async def wait_across_env(self, player_id: int) -> None:
        """Waits until ``player_id`` is on turn or the game is over; raises if it was abandoned."""
        if not self._started:
            await self.play_others()
        while True:
            self._raise_if_abandoned()
            if self.game_done or self.current_player_id == player_id:
                return
            await self._changed.wait()

    def leave(self, failed: bool) -> None:
        """Notifies the others that a seat makes no more moves; no effect after the end."""
        if self.game_done or self._error is not None:
            return
        if failed:
            self._abandon(GameAbandonedError("the rollout of another player failed"))
        else:
            self.left = True
            self._notify()

    def reward(self, seat: int) -> float:
        """Returns the reward of a seat; 0 if the game has no result for it."""
        if self.illegal_player_id is not None:
            return ILLEGAL_MOVE_REWARD if seat == self.illegal_player_id else 0.0
        return float((self.rewards or {}).get(seat, 0.0)) if self.state.done else 0.0

    def outcome(self, seat: int) -> str:
        """Returns "win", "draw" or "loss": the seat's reward compared with the others'."""
        others = [self.reward(s) for s in range(self.num_players) if s != seat] or [0.0]
        difference = self.reward(seat) - sum(others) / len(others)
        return "draw" if abs(difference) < 1e-9 else "win" if difference > 0 else "loss"

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
                f"{self.settings.game_name}: another player's rollout failed, so the game was "
                f"abandoned ({type(self._error).__name__}: {self._error})"
            )

    @contextlib.contextmanager
    def _own_random(self, what: str) -> Iterator[None]:
        with _generator:
            outer = random.getstate()
            random.setstate(self._random)
            try:
                yield
            except Exception as error:
                raise GameError(
                    f"{self.settings.game_name}: the game failed at the {what} "
                    f"({type(error).__name__}: {error}); this is an error of the game, not of the "
                    "player"
                ) from error
            finally:
                self._random = random.getstate()
                random.setstate(outer)


OpenPlayer = Callable[[int], "MessageCompleter | None"]
"""Returns the player of a seat in a game with this seed, ``None`` for a trained seat."""


@cache
def _size(game_name: str) -> int:
    """Returns a number of players with which a game starts, at least 2 if possible."""
    for size in _SEATS_TO_TRY:
        # A game may accept too few players and fail at its first observation.
        with contextlib.suppress(ConfigurationError, GameError):
            Game.start(GameSettings(game_name=game_name, num_players=size), seed=0).observe()
            return size
    return _SEATS_TO_TRY[0]


_OFFER = re.compile(r"available|legal|remaining|your hand|options", re.IGNORECASE)
_MOVE = re.compile(r"['\"`](\[[^\[\]\n]{1,40}\])['\"`]")


def legal_moves(text: str) -> list[str]:
    """Returns the moves that a prompt offers, such as ``[4]``.

    They are the quoted brackets of the last line that speaks of available moves or of a hand, or
    else all quoted brackets of the prompt, which are then examples of the rules.
    """
    lines = [line for line in text.splitlines() if _OFFER.search(line) and _MOVE.search(line)]
    return list(dict.fromkeys(_MOVE.findall(lines[-1] if lines else text)))


def startable() -> dict[str, str]:
    """Returns each game with "" if it starts here, else with the reason why it does not.

    A game has several variants, of which the one with the shortest name is listed.
    """
    shortest: dict[str, str] = {}
    for name in sorted(_registry(), key=len):
        shortest.setdefault(str(_registry()[name].entry_point), name)
    reasons: dict[str, str] = {}
    for name in sorted(shortest.values()):
        try:
            Game.start(GameSettings(game_name=name), seed=0).observe()
            reasons[name] = ""
        except (ConfigurationError, GameError) as error:
            reasons[name] = str(error)
    return reasons


if __name__ == "__main__":
    for _name, _reason in startable().items():
        print(_name if not _reason else f"{_name}: does not start here: {_reason}")
