"""Games of TextArena by name, each with its own random state.

TextArena uses Python's global random generator, so two games that run at the same time would change
each other's cards. Here each game has its own state of the generator, which is active only while
the game computes. So a game depends only on its seed and its moves.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import re
import threading
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError, TrainingError, nearest_sentence
from tinker_cookbook.utils.imports import missing_extra

if TYPE_CHECKING:
    import textarena as ta

_SEATS_TO_TRY = (2, 1, 3, 4, 5, 6, 7, 8)
_generator = threading.RLock()


class GameError(TrainingError):
    """A game raised an error; the message contains the move that caused it."""


def load_textarena() -> Any:
    """Returns the module ``textarena``; raises ``ConfigurationError`` if it is not installed."""
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise missing_extra("games of TextArena", error, "multiplayer-rl") from error


def game_names() -> list[str]:
    """Returns the names of all registered games and their variants, sorted."""
    load_textarena()
    return sorted(importlib.import_module("textarena.envs.registration").ENV_REGISTRY)


def main_games() -> list[str]:
    """Returns one name of each game: the variant with the shortest name."""
    load_textarena()
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    shortest: dict[str, str] = {}
    for name, spec in registry.items():
        kept = shortest.setdefault(str(spec.entry_point), name)
        shortest[str(spec.entry_point)] = min(kept, name, key=len)
    return sorted(shortest.values())


@chz.chz
class GameSettings:
    """Name and arguments of a game, and how it is shown and scored."""

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
    score: Literal["outcome", "chips"] = chz.field(
        default="outcome",
        doc="outcome: the reward of the game; chips: the chips won, in games with player_chips",
    )
    on_illegal: Literal["end", "game"] = chz.field(
        default="end",
        doc="end: an illegal move ends the game; game: the game handles it, often with a retry",
    )

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a game that does not exist or cannot start here."""
        known = game_names()
        if self.game_name not in known:
            # Variants differ in their ending only, so the hint names games, not variants.
            raise ConfigurationError(
                f"game_name: got {self.game_name!r}, expected one of {len(main_games())} games of "
                f"TextArena or their variants{nearest_sentence(self.game_name, known)}"
                " All names: python -m recipes.multiplayer_rl.text_arena.games"
            )
        game = Game.start(self, seed=0)
        if self.score == "chips" and not game.has_chips:
            raise ConfigurationError(
                f"score: got 'chips', but {self.game_name} has no player_chips; expected 'outcome'"
            )

    @property
    def seats(self) -> int:
        """Number of players."""
        return len(Game.start(self, seed=0).chairs)


class Game:
    """One game in progress, with its own random numbers.

    Args:
        env: A game of TextArena that has been reset.
        settings: How it is shown and scored.
        state: State of its random numbers; default: the state of the global generator.
    """

    def __init__(self, env: ta.Env, settings: GameSettings, state: Any = None) -> None:
        self.env, self.settings = env, settings
        self._random = random.getstate() if state is None else state

    @classmethod
    def start(cls, settings: GameSettings, seed: int) -> Game:
        """Starts a game; raises ``ConfigurationError`` if it cannot start here."""
        sizes = _sizes(settings.game_name) if settings.num_players is None else ()
        errors: list[BaseException] = []
        for size in sizes or (settings.num_players or 1,):
            outer = random.getstate()
            try:
                # Some games print while they set up the board.
                with _generator, contextlib.redirect_stdout(io.StringIO()):
                    random.seed(seed)
                    env = load_textarena().make(settings.game_name, **settings.game_options)
                    env.reset(num_players=size, seed=seed)
                    return cls(env, settings, random.getstate())
            except ConfigurationError:
                raise
            # Games raise assertions for a wrong number of players, and anything for missing data.
            except Exception as error:
                errors.append(error)
            finally:
                random.setstate(outer)
        raise ConfigurationError(_why_not(settings, errors[0])) from errors[0]

    @property
    def state(self) -> Any:
        """TextArena's state of the game."""
        return self.env.state  # type: ignore[attr-defined]

    @property
    def chairs(self) -> range:
        """Numbers of the seats."""
        return range(self.state.num_players)

    @property
    def turn(self) -> int:
        """Seat that moves next."""
        return int(self.state.current_player_id)

    @property
    def done(self) -> bool:
        """Whether the game has ended by its rules."""
        return bool(self.state.done)

    @property
    def has_chips(self) -> bool:
        """Whether the game counts chips of each player."""
        return "player_chips" in (getattr(self.state, "game_state", None) or {})

    def observe(self) -> str:
        """Returns what the seat to move sees: the whole history, as the game's wrappers show it."""
        with self._own_random(), self._errors("observation"):
            seat, text = self.env.get_observation()
        text = str(text)
        if not self.settings.show_rules:
            for rules in self._rules(seat):
                text = text.replace(f"[GAME] {rules}", "").replace(rules, "")
        return text.strip()

    def move(self, text: str) -> bool:
        """Makes a move of the seat on turn; returns whether the game accepted it as legal."""
        seat, errors = self.turn, self._errors_of_turn()
        with self._own_random(), self._errors(f"move {text!r} of player {seat}"):
            self._add_to_pot(seat, text)
            self.env.step(text)
        return self._errors_of_turn() <= errors and not self._marked_invalid(seat)

    def _add_to_pot(self, seat: int, text: str) -> None:
        """Moves the chip of a bet or call into the pot, as the rules of Kuhn poker say.

        TextArena (0.7.4) leaves the pot at the antes, so a bet and a call cost nothing there.
        """
        if not self.settings.game_name.startswith("KuhnPoker"):
            return
        state = self.state.game_state
        # As the game reads it: the first move in brackets, if it is legal now.
        found = re.search(r"\[(check|bet|fold|call)\]", text.lower())
        if found and found[1] in ("bet", "call") and found[1] in state["current_legal_action_tree"]:
            state["player_chips"][seat] -= 1
            state["pot"] += 1

    def rewards(self) -> dict[int, float]:
        """Returns the reward of each seat after the end of the game."""
        if self.settings.score == "chips":
            chips = self.state.game_state["player_chips"]
            # Antes of a round that is not played any more cancel out in the difference.
            mean = sum(chips.values()) / len(chips)
            return {seat: float(chips[seat] - mean) for seat in self.chairs}
        found = self.state.rewards or {}
        return {seat: float(found.get(seat, 0.0)) for seat in self.chairs}

    def _errors_of_turn(self) -> int:
        return int(getattr(self.state, "error_count", 0))

    def _marked_invalid(self, seat: int) -> bool:
        return bool(
            (getattr(self.state, "game_info", None) or {}).get(seat, {}).get("invalid_move")
        )

    def _rules(self, seat: int) -> list[str]:
        prompt = load_textarena().ObservationType.PROMPT
        env: Any = self.env
        # Each wrapper passes attributes of the game on; the history comes from the outermost one.
        history = getattr(env, "full_observations", {}).get(seat, [])
        return [message for _, message, kind in history if kind == prompt]

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        with _generator:
            outer = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outer)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise GameError(
                f"{self.settings.game_name}: the game failed at the {what} ({type(error).__name__}:"
                f" {error}); this is an error of the game, not of the player"
            ) from error


@cache
def _sizes(game_name: str) -> tuple[int, ...]:
    """Returns numbers of players, that which works first."""
    for size in _SEATS_TO_TRY:
        with contextlib.suppress(ConfigurationError):
            game = Game.start(GameSettings(game_name=game_name, num_players=size), seed=0)
            # A game may accept too few players and fail at its first observation.
            with contextlib.suppress(GameError):
                game.observe()
                return (size,)
    return _SEATS_TO_TRY[:1]


def _why_not(settings: GameSettings, error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = settings.game_name
    if isinstance(error, SyntaxError):
        return f"game_name: {name} needs Python 3.12 or newer ({text}); expected another game"
    if isinstance(error, LookupError) and "nltk" in text.lower():
        found = re.search(r"Resource '?(\w+)'? not found", text)
        resource = found[1] if found else "words"
        return (
            f"game_name: {name} needs the data {resource!r} of nltk, which are not here; next "
            f"step: python -m nltk.downloader {resource}, or another game"
        )
    return (
        f"game_name: {name} cannot start with num_players={settings.num_players} and game_options="
        f"{settings.game_options} ({type(error).__name__}: {text[:200]}); expected another game, "
        "number of players or other options"
    )


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
    """Returns each game with "" if it starts here, else with the reason why it does not."""
    reasons: dict[str, str] = {}
    for name in main_games():
        try:
            Game.start(GameSettings(game_name=name), seed=0).observe()
            reasons[name] = ""
        except (ConfigurationError, GameError) as error:
            reasons[name] = str(error)
    return reasons


if __name__ == "__main__":
    for _name, _reason in startable().items():
        print(_name if not _reason else f"{_name}: does not start here: {_reason}")
