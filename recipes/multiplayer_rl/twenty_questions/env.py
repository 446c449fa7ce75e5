"""Twenty questions: the model asks about a hidden word, another one answers, till the word is said.

The answerer is any ``MessageCompleter``: another model, this one untrained, a person, a rule. It
sees the word and one question at a time, and of what it says only Yes or No is passed on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import chz

from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, StopReason

PLAYER_PROMPT = (
    "We play a game. I am thinking of a thing, and you find out what it is by asking me questions "
    "that can be answered with yes or no. You may ask {max_questions} questions, one a message. "
    "As soon as you know the thing, write: Guess: THING"
)
ANSWERER_PROMPT = (
    "We play a game of questions about a thing. The thing is: {word}. Answer each question about "
    "{word} truthfully with Yes or No, and nothing else."
)
_VERDICT = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
# "Guess: an apple", but also "Is it an apple?", which a model says of itself.
_GUESS = re.compile(
    r"(?:\bguess\s*:|\bis it|\bis the thing)\s+(?:(?:an?|the)\s+)?([^.?!\n]+)", re.IGNORECASE
)


@chz.chz
class Rules:
    """The rules."""

    max_questions: int = chz.field(default=20, doc="Questions and guesses in all")
    malformed_reward: float = chz.field(default=-0.1, doc="Reward of a message that was cut off")

    @chz.validate
    def _check(self) -> None:
        if self.max_questions < 1:
            raise ConfigurationError(
                f"max_questions: got {self.max_questions}, expected at least 1"
            )


class TwentyQuestionsEnv(MessageEnv):
    """One game: 1 for the word, 0 when the questions are used up."""

    def __init__(self, word: str, answerer: MessageCompleter, rules: Rules) -> None:
        if not plain(word):
            raise ConfigurationError(f"word: got {word!r}, expected a word")
        self.word, self.answerer, self.rules = word, answerer, rules
        self.messages: list[Message] = []
        self.questions = 0
        self.unclear = 0
        self.won = False

    async def initial_observation(self) -> list[Message]:
        """The rules, and the call for the first question."""
        rules = PLAYER_PROMPT.format(max_questions=self.rules.max_questions)
        self.messages = [
            {"role": "system", "content": rules},
            {"role": "user", "content": "Ask your first question."},
        ]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Takes a question or a guess."""
        self.questions += 1
        self.messages = [*self.messages, message]
        text = get_text_content(message)
        self.won = is_right(text, self.word)
        if self.won or self.questions >= self.rules.max_questions:
            return MessageStepResult(
                reward=float(self.won), episode_done=True, next_messages=self.messages
            )
        answer = await self._answer(text)
        self.messages = [*self.messages, {"role": "user", "content": answer}]
        return MessageStepResult(
            reward=0.0,
            episode_done=False,
            next_messages=self.messages,
            logs={"question": text, "answer": answer},
        )

    async def grade(
        self, messages: list[Message], stop_reason: StopReason | str
    ) -> tuple[float, Metrics]:
        """Counts what the whole game came to; the steps have paid for it."""
        return 0.0, {
            "correct": float(self.won),
            "questions": self.questions,
            "unclear_answers": self.unclear,
        }

    async def _answer(self, question: str) -> str:
        prompt = ANSWERER_PROMPT.format(word=self.word)
        reply = await self.answerer(
            [{"role": "system", "content": prompt}, {"role": "user", "content": question}]
        )
        verdict = _VERDICT.match(get_text_content(reply))
        if verdict is None:
            self.unclear += 1
            return "I cannot say."
        return f"{verdict[1].capitalize()}."


def is_right(text: str, word: str) -> bool:
    """Whether ``text`` guesses ``word``, as "Guess: WORD" or "Is it a WORD?".

    Only the last guess of a message counts, so that it cannot name everything there is.
    """
    guesses = _GUESS.findall(text)
    return bool(guesses) and plain(guesses[-1]) == plain(word)


def plain(text: str) -> str:
    """``text`` in lower case, without punctuation, spaces and a plural s."""
    return re.sub(r"[^a-z0-9]", "", text.lower()).removesuffix("s")


@dataclass(frozen=True)
class TwentyQuestionsGroupBuilder(EnvGroupBuilder):
    """Games about the same word.

    ``make_answerer`` gives the answerer where the game is played; to play in another process it
    must pickle, which a ``functools.partial`` or an ``AnswererConfig`` does.
    """

    word: str
    make_answerer: Callable[[], MessageCompleter]
    rules: Rules
    renderer: Renderer
    num_envs: int

    async def make_envs(self) -> Sequence[Env]:
        """All games of the group."""
        return [await self.make_env(i) for i in range(self.num_envs)]

    async def make_env(self, index: int) -> Env:
        """One game."""
        # The first call may load a model.
        answerer = await asyncio.to_thread(self.make_answerer)
        return EnvFromMessageEnv(
            self.renderer,
            TwentyQuestionsEnv(self.word, answerer, self.rules),
            failed_parse_reward=self.rules.malformed_reward,
            terminate_on_length=False,  # an answer that was cut off is a malformed one
        )

    def logging_tags(self) -> list[str]:
        """The game's name."""
        return ["twenty_questions"]
