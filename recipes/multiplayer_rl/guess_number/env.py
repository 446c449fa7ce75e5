"""Guess a hidden number: after each guess the model learns whether the number is higher or lower.

This is the smallest game with several turns in which the second answer should depend on the first.
Binary search always wins if ``2 ** max_turns > high - low + 1``. Random guesses without repetition
win ``max_turns / (high - low + 1)`` of the games.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.grading.numbers import last_number
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    RLDataset,
    RLDatasetBuilder,
    StopReason,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.command_line.keys import also_named


@chz.chz
class Game:
    """The rules."""

    low: int = chz.field(default=1, doc="Smallest possible number")
    high: int = chz.field(default=7, doc="Largest possible number")
    max_turns: int = chz.field(default=3, doc="Guesses")
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
        if self.max_turns < 1:
            raise ConfigurationError(f"max_turns: got {self.max_turns}, expected at least 1")


class GuessNumberEnv(MessageEnv):
    """One game. It ends with reward 1 at a right guess, and with 0 at the last wrong one.

    The last number in an answer is the guess. An answer without one, or with one that is not in
    the range, ends the game with ``malformed_reward``.
    """

    def __init__(self, secret: int, game: Game) -> None:
        if not game.low <= secret <= game.high:
            raise ConfigurationError(
                f"secret: got {secret}, expected a number from {game.low} to {game.high}"
            )
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


@dataclass(frozen=True)
class GuessNumberGroupBuilder(EnvGroupBuilder):
    """Games about the same number."""

    secret: int
    game: Game
    renderer: Renderer
    num_envs: int

    async def make_envs(self) -> Sequence[Env]:
        """Returns all games of the group."""
        return [await self.make_env(i) for i in range(self.num_envs)]

    async def make_env(self, index: int) -> Env:
        """One game."""
        return EnvFromMessageEnv(
            self.renderer,
            GuessNumberEnv(self.secret, self.game),
            failed_parse_reward=self.game.malformed_reward,
            terminate_on_length=False,  # a truncated answer counts as malformed
        )

    def logging_tags(self) -> list[str]:
        """Returns the game's name."""
        return ["guess_number"]


@also_named(batch_size="groups_per_batch", n_batches="num_batches")
@chz.chz
class GuessNumberDatasetBuilder(RLDatasetBuilder):
    """Games about the numbers of a range, each equally often.

    Evaluation uses every number of the range once, or for ``num_test``
    of them.
    """

    game: Game = chz.field(doc="The rules")
    model_name_for_tokenizer: str = chz.field(doc="Model of the tokenizer")
    renderer_name: str = chz.field(doc="Chat format")
    groups_per_batch: int = chz.field(doc="Numbers per step")
    group_size: int = chz.field(doc="Games per number")
    num_batches: int = chz.field(default=40, doc="Steps per epoch")
    num_test: int = chz.field(default=7, doc="Numbers to evaluate on; 0: no evaluation")
    test_group_size: int = chz.field(default=4, doc="Games about a number in evaluation")
    seed: int = chz.field(default=0, doc="Seed of the numbers")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a number out of range."""
        for name, low in (("num_batches", 1), ("num_test", 0), ("test_group_size", 1)):
            if getattr(self, name) < low:
                raise ConfigurationError(
                    f"{name}: got {getattr(self, name)}, expected at least {low}"
                )

    def secrets(self) -> list[int]:
        """Returns the numbers of all batches: the range, reshuffled for each pass."""
        rng = random.Random(self.seed)
        numbers = range(self.game.low, self.game.high + 1)
        needed = self.num_batches * self.groups_per_batch
        secrets: list[int] = []
        while len(secrets) < needed:
            # Without replacement within a round, so that every number occurs equally often.
            secrets += rng.sample(numbers, min(len(numbers), needed - len(secrets)))
        return secrets

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Games to train on and to evaluate on."""
        self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        numbers = range(self.game.low, self.game.high + 1)
        group = partial(self._group, renderer)
        train_set = ProblemDataset(
            self.secrets(),
            partial(group, self.group_size),
            self.groups_per_batch,
            shuffle=False,  # shuffling could put a number into one batch twice
        )
        test = random.Random(self.seed).sample(numbers, min(self.num_test, len(numbers)))
        if not test:
            return train_set, None
        return train_set, ProblemDataset(test, partial(group, self.test_group_size), len(test))

    def _group(self, renderer: Renderer, size: int, secret: int) -> EnvGroupBuilder:
        return GuessNumberGroupBuilder(secret, self.game, renderer, size)
