"""Players that are not trained: random moves, a model with fixed weights, a person."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import (
    MessageCompleter,
    StopCondition,
    TinkerTokenCompleter,
    derived_seed,
)
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.recipes.multiplayer_rl.text_arena.games import legal_moves
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.utils.terminal import get_console

STOP_CONDITION: list[str] = ["]\n"]
"""A move is the first text in square brackets, so an answer may end after it."""


class ContextFullError(DataValidationError):
    """The player's model has no room left for a move, so the player leaves the game."""


class Player(MessageCompleter):
    """Player that may have random numbers; any other ``MessageCompleter`` can play, too."""

    def seated(self, *path: int) -> MessageCompleter:
        """Returns the player of one game, with random numbers that depend on ``path``."""
        return self


def seat(player: MessageCompleter, *path: int) -> MessageCompleter:
    """Returns ``player`` for one game; a player without random numbers as it is."""
    return player.seated(*path) if isinstance(player, Player) else player


def prompt_text(messages: list[Message]) -> str:
    """Returns the text of the last message."""
    return get_text_content(messages[-1])


class RandomOpponent(Player):
    """Picks one of the moves that the prompt offers; ``[0]`` if it offers none.

    ``seed=None``: other moves in each process.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._rng = random.Random(seed)

    def seated(self, *path: int) -> RandomOpponent:
        """Returns the player of one game."""
        return self if self._seed is None else type(self)(derived_seed(self._seed, *path))

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns a move as an assistant's message."""
        moves = legal_moves(prompt_text(messages)) or ["[0]"]
        return {"role": "assistant", "content": self._rng.choice(moves)}


@dataclass
class ModelPlayer(Player):
    """Model with fixed weights: a snapshot of the run, a checkpoint, or a base model.

    ``stop`` ends an answer; empty: the renderer's stop sequences.
    """

    sampling_client: SamplingClient
    renderer: Renderer
    max_tokens: int
    stop: StopCondition = field(default_factory=lambda: list(STOP_CONDITION))
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        self._policy = TinkerTokenCompleter(
            self.sampling_client, self.max_tokens, self.temperature, seed=self.seed
        )
        self._moves = 0

    def seated(self, *path: int) -> ModelPlayer:
        """Returns the player of one game."""
        return self if self.seed is None else replace(self, seed=derived_seed(self.seed, *path))

    async def __call__(self, messages: list[Message]) -> Message:
        """Samples a move; raises ``ContextFullError`` if the game no longer fits the context."""
        # Each move has other random numbers, which do not depend on the other games.
        policy, self._moves = self._policy.derived(self._moves), self._moves + 1
        stop = self.stop or self.renderer.get_stop_sequences()
        try:
            completion = await policy(self.renderer.build_generation_prompt(messages), stop)
        except DataValidationError as error:
            raise ContextFullError(str(error)) from error
        return self.renderer.parse_response(completion.tokens)[0]


class HumanPlayer(Player):
    """Person at the terminal, who sees what a model would see."""

    def __init__(self) -> None:
        self._shown = ""

    async def __call__(self, messages: list[Message]) -> Message:
        """Shows new text and reads a move; adds brackets to a move without them."""
        text = prompt_text(messages)
        # The prompt repeats the history, which the person has read already.
        new = text.removeprefix(self._shown).strip()
        self._shown = text
        console = get_console()
        console.print(f"\n{new}\n", markup=False, highlight=False, soft_wrap=True)
        # In a thread, because a blocking call would stop the other players' requests.
        try:
            move = (await asyncio.to_thread(console.input, "Your move: ")).strip()
        except EOFError as error:
            raise DataValidationError("the input ended before the game did") from error
        return {"role": "assistant", "content": move if "[" in move else f"[{move}]"}
