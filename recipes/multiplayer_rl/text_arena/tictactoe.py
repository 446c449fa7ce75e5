"""Opponents for tic-tac-toe: one with random moves, and one with optimal moves."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any, Literal

import chz

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.backends.connect import make_once
from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.completers import MessageCompleter, StopCondition, derived_seed
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.multiplayer_rl.text_arena.players import (
    STOP_CONDITION,
    ModelPlayer,
    Player,
    RandomOpponent,
    prompt_text,
)
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.training.config import BackendSettings

__all__ = ["OpponentType", "OptimalOpponent", "RandomOpponent", "make_opponent"]

OpponentType = Literal["base_model", "random", "optimal"]
OPPONENT_TYPES: tuple[OpponentType, ...] = ("base_model", "random", "optimal")
BASE_MODEL_MAX_TOKENS = 64

_ROW = re.compile(r"^\s*([OX0-8])\s*\|\s*([OX0-8])\s*\|\s*([OX0-8])\s*$", re.MULTILINE)


@chz.chz
class BaseModel(BackendSettings, SamplerOptions):
    """An untrained model to play against; it shares the base model of the run in progress."""

    model_name: str = chz.field(doc="Hub name or local folder")

    @classmethod
    def of(cls, settings: Any, **values: Any) -> BaseModel:
        """Returns the model of a program's ``settings``, at its backend."""
        return cls(**{name: getattr(settings, name) for name in chz.chz_fields(cls)} | values)

    def client(self) -> SamplingClient:
        """Returns its sampling client; the first call loads the model."""
        return make_once(
            self, lambda service: service.create_sampling_client(base_model=self.model_name)
        ).result()


class OptimalOpponent(Player):
    """Plays tic-tac-toe perfectly: it wins as soon as it can, and never loses.

    Chooses randomly among several best moves, so that games against it differ.
    """

    _WIN_LINES = (
        (0, 1, 2),
        (3, 4, 5),
        (6, 7, 8),
        (0, 3, 6),
        (1, 4, 7),
        (2, 5, 8),
        (0, 4, 8),
        (2, 4, 6),
    )

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._rng = random.Random(seed)

    def seated(self, *path: int) -> OptimalOpponent:
        """Returns the player of one game."""
        return self if self._seed is None else type(self)(derived_seed(self._seed, *path))

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns a best move as an assistant's message."""
        text = prompt_text(messages)
        moves = best_moves(read_board(text), own_mark(text))
        return {"role": "assistant", "content": f"[{self._rng.choice(moves) if moves else 0}]"}


def read_board(text: str) -> str:
    """Returns the last board of a prompt: nine characters O, X or a space."""
    rows = _ROW.findall(text)[-3:]
    if len(rows) != 3:
        raise ConfigurationError(
            "opponent: got 'optimal' for a prompt without a board of tic-tac-toe; expected the "
            f"game TicTacToe-v0, or another opponent. The prompt: {text[-200:]!r}"
        )
    return "".join(cell if cell in "OX" else " " for row in rows for cell in row)


def own_mark(text: str) -> str:
    """Returns the mark of the player who reads a prompt: as stated, or derived from the turn."""
    told = re.search(r"you will be '([OX])'", text)
    if told is not None:
        return told[1]
    board = read_board(text)
    # In TextArena O moves first.
    return "O" if board.count("O") == board.count("X") else "X"


def winner(board: str) -> str | None:
    """Returns the mark that has three in a row, or ``None``."""
    for a, b, c in OptimalOpponent._WIN_LINES:
        if board[a] == board[b] == board[c] != " ":
            return board[a]
    return None


def best_moves(board: str, mark: str) -> list[int]:
    """Returns all moves with the best outcome: a fast win, else a draw, else a late loss."""
    values = {
        cell: -_value(board[:cell] + mark + board[cell + 1 :], _other(mark))
        for cell in range(9)
        if board[cell] == " "
    }
    return [cell for cell, value in values.items() if value == max(values.values())]


@cache
def _value(board: str, mark: str) -> int:
    """Value for ``mark``, who moves next: above 0 wins; more the sooner."""
    # The other player has just moved, so only that one can have won.
    if winner(board) is not None:
        return -1 - board.count(" ")
    if " " not in board:
        return 0
    return max(
        -_value(board[:cell] + mark + board[cell + 1 :], _other(mark))
        for cell in range(9)
        if board[cell] == " "
    )


def _other(mark: str) -> str:
    return "X" if mark == "O" else "O"


def make_opponent(
    opponent_type: OpponentType,
    model_name: str,
    renderer: Renderer,
    base_url: str | None = None,
    stop_condition: StopCondition | None = None,
) -> MessageCompleter:
    """Returns an opponent: the untrained model, one that moves at random, or the optimal one."""
    if opponent_type == "random":
        return RandomOpponent()
    if opponent_type == "optimal":
        return OptimalOpponent()
    if opponent_type != "base_model":
        raise ConfigurationError(
            f"opponent_type: got {opponent_type!r}, expected one of {', '.join(OPPONENT_TYPES)}"
            f"{nearest(opponent_type, OPPONENT_TYPES)}"
        )
    client = BaseModel(base_url=base_url, model_name=model_name).client()
    stop = list(STOP_CONDITION) if stop_condition is None else stop_condition
    return ModelPlayer(client, renderer, BASE_MODEL_MAX_TOKENS, stop)
