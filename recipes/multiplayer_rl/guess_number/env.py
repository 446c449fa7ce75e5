"""Guess a hidden number: after each guess the model learns whether the number is higher or lower.

This is the smallest game with several turns in which the second answer should depend on the first.
Binary search always wins if ``2 ** max_turns > high - low + 1``. Random guesses without repetition
win ``max_turns / (high - low + 1)`` of the games.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.grading.numbers import last_number
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.types import Env, Metrics, StopReason
from tinker_cookbook.training.config import number


@chz.chz
class Game:
    """The rules."""

    low: int = chz.field(default=1, doc="Smallest possible number")
    high: int = chz.field(default=7, doc="Largest possible number")
    max_turns: int = number(3, "Guesses", low=1)
    malformed_reward: float = chz.field(
        default=-0.1, doc="Reward of an answer that has no number in the range, or is cut off"
    )

    @chz.validate
    def _check(self) -> None:
        if self.high <= self.low:
            raise ConfigurationError(
                f"high: got {self.high}, expected more than low={self.low}: there is nothing to "
                "guess"
            )


class GuessNumberEnv(MessageEnv):
    """One game. It ends with reward 1 at a right guess, and with 0 at the last wrong one.

    The last number in an answer is the guess. An answer without one, or with one that is not in
    the range, ends the game with ``malformed_reward``.
    """

    def __init__(self, secret: int, game: Game) -> None:
        self.secret, self.game = secret, game
        self.messages: list[Message] = []
        self.turns = 0
        self.won = False

    async def initial_observation(self) -> list[Message]:
        """Returns the rules, and the call for the first guess."""
        question = (
            f"I am thinking of a whole number from {self.game.low} to {self.game.high}. Guess it! "
            "Reply with one number only."
        )
        self.messages = [{"role": "user", "content": question}]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Takes a guess."""
        self.turns += 1
        self.messages = [*self.messages, message]
        guess = self._guess(get_text_content(message))
        # A malformed answer ends the game, by default with a lower reward than a wrong guess.
        if guess is None:
            return self._end(self.game.malformed_reward)
        if guess == self.secret:
            self.won = True
            return self._end(1.0)
        if self.turns >= self.game.max_turns:
            return self._end(0.0)
        way = "higher" if self.secret > guess else "lower"
        self.messages = [
            *self.messages,
            {"role": "user", "content": f"No. My number is {way} than {guess}. Guess again."},
        ]
        return MessageStepResult(reward=0.0, episode_done=False, next_messages=self.messages)

    async def grade(
        self, messages: list[Message], stop_reason: StopReason | str
    ) -> tuple[float, Metrics]:
        """Returns metrics of the whole game; its steps already have the rewards."""
        return 0.0, {"correct": float(self.won), "guesses": self.turns}

    def _guess(self, text: str) -> int | None:
        number = last_number(text)
        # Numbers of more digits are out of range, and int() refuses very long ones.
        if number is None or not number.lstrip("-").isdecimal() or len(number) > 18:
            return None
        return int(number) if self.game.low <= int(number) <= self.game.high else None

    def _end(self, reward: float) -> MessageStepResult:
        return MessageStepResult(reward=reward, episode_done=True, next_messages=self.messages)


@chz.chz
class GuessNumberDatasetBuilder(ProblemDatasetBuilder):
    """Games about the numbers of a range, each equally often.

    Evaluation uses every number of the range, or ``num_test`` of them.
    """

    game: Game = chz.field(doc="The rules")
    n_batches: int = number(40, "Steps per epoch", low=1)
    num_test: int = number(7, "Numbers to evaluate on; 0: no evaluation")
    test_group_size: int = number(4, "Games about a number in evaluation", low=1)

    shuffle = False  # it could put a number into one batch twice

    def load(self) -> tuple[list[int], list[int]]:
        """Returns the numbers of all batches (the range, reshuffled for each pass), and those to
        evaluate on."""
        rng = random.Random(self.seed)
        numbers = range(self.game.low, self.game.high + 1)
        needed = self.n_batches * self.batch_size
        secrets: list[int] = []
        while len(secrets) < needed:
            # Without replacement within a round, so that every number occurs equally often.
            secrets += rng.sample(numbers, min(len(numbers), needed - len(secrets)))
        count = min(self.num_test, len(numbers))
        return secrets, random.Random(self.seed).sample(numbers, count)

    def env_thunk(self, problem: int, renderer: Renderer) -> Callable[[], Env]:
        """Returns a game about a number."""
        return partial(_game, problem, self.game, renderer)

    def tag(self, problem: int) -> str:
        """Returns the game's name."""
        return "guess_number"


def _game(secret: int, game: Game, renderer: Renderer) -> Env:
    return EnvFromMessageEnv(
        renderer,
        GuessNumberEnv(secret, game),
        failed_parse_reward=game.malformed_reward,
        terminate_on_length=False,  # a truncated answer counts as malformed
    )
