"""Opponents with fixed rules or weights: random moves, optimal tic-tac-toe, a model."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tinker_cookbook.completers import MessageCompleter, StopCondition, TinkerTokenCompleter
from tinker_cookbook.recipes.multiplayer_rl.fixed_model import FixedModel
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import STOP_CONDITION, legal_moves
from tinker_cookbook.renderers import Message, Renderer, get_text_content

OpponentType = Literal["base_model", "random", "optimal"]

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
_ROW = re.compile(r"^\s*([OX0-8])\s*\|\s*([OX0-8])\s*\|\s*([OX0-8])\s*$", re.MULTILINE)


class RandomOpponent(MessageCompleter):
    """Picks one of the moves that the prompt offers; ``[0]`` if it offers none.

    ``seed=None``: other moves in each process.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._rng = random.Random(seed)

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns a move as an assistant's message."""
        moves = legal_moves(get_text_content(messages[-1])) or ["[0]"]
        return {"role": "assistant", "content": self._rng.choice(moves)}


class OptimalOpponent(MessageCompleter):
    """Plays tic-tac-toe perfectly: it wins as soon as it can, and never loses.

    Chooses randomly among several best moves, so that games against it differ.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._rng = random.Random(seed)

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns a best move as an assistant's message."""
        text = get_text_content(messages[-1])
        moves = best_moves(read_board(text), own_mark(text))
        return {"role": "assistant", "content": f"[{self._rng.choice(moves) if moves else 0}]"}


def read_board(text: str) -> str:
    """Returns the last board of a prompt: nine characters O, X or a space."""
    rows = _ROW.findall(text)[-3:]
    return "".join(cell if cell in "OX" else " " for row in rows for cell in row)


def own_mark(text: str) -> str:
    """Returns the mark of the player who reads a prompt: as stated, or derived from the turn."""
    told = re.search(r"you will be '([OX])'", text)
    if told is not None:
        return told[1]
    board = read_board(text)
    # In TextArena O moves first.
    return "O" if board.count("O") == board.count("X") else "X"


def best_moves(board: str, mark: str) -> list[int]:
    """Returns all moves with the best outcome: a fast win, else a draw, else a late loss."""
    values = {cell: -_value(after, _other(mark)) for cell, after in _next_boards(board, mark)}
    return [cell for cell, value in values.items() if value == max(values.values())]


def _next_boards(board: str, mark: str) -> list[tuple[int, str]]:
    return [(i, board[:i] + mark + board[i + 1 :]) for i in range(9) if board[i] == " "]


@cache
def _value(board: str, mark: str) -> int:
    """Value for ``mark``, who moves next: above 0 wins; more the sooner."""
    # The other player has just moved, so only that one can have won.
    if any(board[a] == board[b] == board[c] != " " for a, b, c in _WIN_LINES):
        return -1 - board.count(" ")
    after = [-_value(after, _other(mark)) for _, after in _next_boards(board, mark)]
    return max(after, default=0)


def _other(mark: str) -> str:
    return "X" if mark == "O" else "O"


@dataclass
class ModelPlayer(MessageCompleter):
    """Plays by a policy with fixed weights: a checkpoint or a base model."""

    policy: TinkerTokenCompleter
    renderer: Renderer
    stop: StopCondition | None = None
    """Ends an answer; None: the renderer's stop sequences."""
    moves: int = 0

    async def __call__(self, messages: list[Message]) -> Message:
        """Samples a move; raises ``DataValidationError`` if the prompt exceeds the context."""
        # Each move has other random numbers, which do not depend on the other games.
        policy, self.moves = self.policy.derived(self.moves), self.moves + 1
        stop = self.stop or self.renderer.get_stop_sequences()
        completion = await policy(self.renderer.build_generation_prompt(messages), stop)
        return self.renderer.parse_response(completion.tokens)[0]


def make_opponent(
    opponent_type: OpponentType,
    model_name: str,
    renderer: Renderer,
    base_url: str | None = None,
    stop_condition: StopCondition | None = None,
) -> MessageCompleter:
    """Returns an opponent: the untrained model, one that moves at random, or the optimal one."""
    if opponent_type != "base_model":
        return BY_RULES[opponent_type]()
    client = FixedModel(base_url=base_url, model_name=model_name).client()
    return ModelPlayer(TinkerTokenCompleter(client, 64), renderer, stop_condition or STOP_CONDITION)


BY_RULES = {"random": RandomOpponent, "optimal": OptimalOpponent}
