"""Twenty questions: the model guesses a hidden word, another model answers its questions.

The answerer is a ``MessageCompleter``: another model, this model before training, a person, or a
program. It gets the word and one question at a time, and only the Yes or No of its answer is used.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from functools import partial

import chz

from tinker_cookbook.completers import MessageCompleter, TinkerMessageCompleter
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.recipes.multiplayer_rl.fixed_model import FixedModel
from tinker_cookbook.recipes.start import example_data, read_text, renderer_of
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.envs.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.types import Env, Metrics, StopReason
from tinker_cookbook.training.config import number

WORDS = example_data("twenty_questions_words.txt")

Answerer = Callable[[list[Message]], Awaitable[Message]]
"""A ``MessageCompleter``, or what answers a conversation like one."""


@chz.chz
class AnswererConfig(FixedModel):
    """A model that answers greedily; it is loaded for the first answer, once in a process."""

    renderer_name: str | None = chz.field(default=None, doc="Chat format; default: the model's")
    max_tokens: int = number(5, "Maximum tokens of an answer; yes and no are short", low=1)

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns the answer to a conversation."""
        completer = await asyncio.to_thread(self._completer)
        return await completer(messages)

    def _completer(self) -> MessageCompleter:
        renderer = renderer_of(self.model_name, self.renderer_name)
        return TinkerMessageCompleter(self.client(), renderer, self.max_tokens, temperature=0.0)


def read_words(path: str) -> list[str]:
    """Returns the words of a file, one a line; lines that begin with ``#`` are comments."""
    lines = map(str.strip, read_text(path, "words_path").splitlines())
    # Guesses are compared in this form, so two words with one form are the same word.
    found = {plain(line): line for line in lines if plain(line) and not line.startswith("#")}
    if not found:
        raise DataValidationError(f"words_path: {path} has no word; expected one a line")
    return list(found.values())


@chz.chz
class Rules:
    """The rules."""

    max_questions: int = number(20, "Maximum number of questions and guesses in a game", low=1)
    malformed_reward: float = chz.field(default=-0.1, doc="Reward of a message that was cut off")


@chz.chz
class TwentyQuestionsDatasetBuilder(ProblemDatasetBuilder):
    """Games about the words of a file; some are held out for evaluation."""

    answerer: AnswererConfig = chz.field(doc="Model that answers the questions")
    rules: Rules = chz.field(doc="The rules")
    words_path: str = chz.field(default=str(WORDS), doc="File with the words, one per line")
    num_test: int = chz.field(default=16, doc="Words held out for evaluation; 0: no evaluation")

    def check(self) -> None:
        """Raises for a file without words and for a number of words out of range."""
        count = len(read_words(self.words_path))
        if not 0 <= self.num_test < count:
            raise ConfigurationError(
                f"num_test: got {self.num_test}, expected less than the {count} words of "
                f"{self.words_path}"
            )

    def load(self) -> tuple[list[str], list[str]]:
        """Returns the words to train on and to evaluate on."""
        words = read_words(self.words_path)
        random.Random(self.seed).shuffle(words)
        return words[self.num_test :], words[: self.num_test]

    def env_thunk(self, problem: str, renderer: Renderer) -> Callable[[], Env]:
        """Returns a game about a word."""
        return partial(make_game, problem, self.answerer, self.rules, renderer)

    def tag(self, problem: str) -> str:
        """Returns the game's name."""
        return "twenty_questions"


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
# "Guess: an apple", but also "Is it an apple?", which models write without instruction.
_GUESS = re.compile(
    r"(?:\bguess\s*:|\bis it|\bis the thing)\s+(?:(?:an?|the)\s+)?([^.?!\n]+)", re.IGNORECASE
)


class TwentyQuestionsEnv(MessageEnv):
    """One game: 1 for the word, 0 when the questions are used up."""

    def __init__(self, word: str, answerer: Answerer, rules: Rules) -> None:
        self.word, self.answerer, self.rules = word, answerer, rules
        self.messages: list[Message] = []
        self.questions = 0
        self.unclear = 0
        self.won = False

    async def initial_observation(self) -> list[Message]:
        """Returns the rules, and the call for the first question."""
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
        # A guess needs no answer, and the last question gets none: the game is over.
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
        """Returns metrics of the whole game; its steps already have the rewards."""
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
        # Only the verdict is passed on, because the reply may contain the hidden word.
        verdict = _VERDICT.match(get_text_content(reply))
        if verdict is None:
            self.unclear += 1
            return "I cannot say."
        return f"{verdict[1].capitalize()}."


def is_right(text: str, word: str) -> bool:
    """Whether ``text`` guesses ``word``, as "Guess: WORD" or "Is it a WORD?".

    Only the last guess of a message counts, so that a list of words cannot win.
    """
    guesses = _GUESS.findall(text)
    # A message that lists many guesses counts by its last one.
    return bool(guesses) and plain(guesses[-1]) == plain(word)


def plain(text: str) -> str:
    """Returns ``text`` in lower case, without punctuation, spaces and a plural s."""
    return re.sub(r"[^a-z0-9]", "", text.lower()).removesuffix("s")


def make_game(word: str, answerer: Answerer, rules: Rules, renderer: Renderer) -> Env:
    """Returns a game about a word, as the training loop plays it."""
    return EnvFromMessageEnv(
        renderer,
        TwentyQuestionsEnv(word, answerer, rules),
        failed_parse_reward=rules.malformed_reward,
        terminate_on_length=False,  # an answer that was cut off is a malformed one
    )
