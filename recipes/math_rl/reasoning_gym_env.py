"""Tasks of the package reasoning-gym: puzzles, algebra and logic, generated from a seed.

Every generator can be used by name (``chain_sum``, ``countdown``, ``letter_counting``, …). Answers
are scored from 0 to 1 by its ``score_answer``; some generators return a small score for a wrong
answer. Scoring may use symbolic algebra, so it runs in a worker process with a timeout.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.grading.worker_pool import TimedPool
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.envs.problem_dataset import ProblemDatasetBuilder
from tinker_cookbook.rl.envs.problem_env import ProblemEnv
from tinker_cookbook.rl.types import Env
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.imports import missing_extra, pebble

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 10.0

Entry = dict[str, Any]
"""A problem of a generator: question, answer, metadata."""

# Separate from the grading pool, because its workers import another package.
_pool = TimedPool(timeout_seconds=DEFAULT_TIMEOUT_SECONDS, preload=["reasoning_gym"])


class ReasoningGymEnv(ProblemEnv):
    """One problem of a generator.

    With an ``answer_tag`` the answer is the content of the last ``<TAG>…</TAG>``, which the
    question requests and the format reward checks; without a tag, it is the whole reply.
    """

    def __init__(
        self,
        generator: str,
        entry: Entry,
        renderer: Renderer,
        convo_prefix: list[Message] | None = None,
        config: Mapping[str, Any] | None = None,
        answer_tag: str | None = "answer",
        format_coef: float = 0.1,
        scoring_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(renderer, convo_prefix, format_coef=format_coef)
        self.generator, self.entry, self.config = generator, entry, dict(config or {})
        self.answer_tag = answer_tag
        self.scoring_timeout_seconds = scoring_timeout_seconds

    def get_question(self) -> str:
        """Returns the generator's question with the expected answer tag."""
        question = str(self.entry["question"])
        tag = self.answer_tag
        if tag is None:
            return question
        return f"{question}\n\nWrite your final answer between <{tag}> and </{tag}>."

    async def check_answer(self, sample_str: str) -> float:
        """Returns the generator's score of the answer, from 0 to 1."""
        answer = self._answer(sample_str)
        if answer is None:
            return 0.0
        try:
            return await _pool.call(
                _score,
                self.generator,
                # Sorted JSON as a hashable key: the worker caches scorers by their settings.
                json.dumps(self.config, sort_keys=True),
                answer,
                self.entry,
                timeout_seconds=self.scoring_timeout_seconds,
            )
        # The answer determines how long scoring takes, so a timeout is not an error of the run.
        except (TimeoutError, pebble.ProcessExpired) as error:
            logger.warning(
                "scoring an answer to %s ended without a score (%s); it gets 0: %.80r",
                self.generator,
                error or f"more than {self.scoring_timeout_seconds:g} s",
                answer,
            )
            return 0.0

    def check_format(self, sample_str: str) -> bool:
        """Returns whether the reply has an answer in the expected tag."""
        return bool(self._answer(sample_str))

    def get_reference_answer(self) -> str:
        """Returns a correct answer; empty if the generator has none."""
        answer = self.entry.get("answer")
        return "" if answer is None else str(answer)

    def _answer(self, reply: str) -> str | None:
        if self.answer_tag is None:
            return reply.strip()
        tag = re.escape(self.answer_tag)
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", reply, re.DOTALL)
        return found[-1].strip() if found else None


def _score(generator: str, config: str, answer: str, entry: Entry) -> float:
    # Runs in a worker process.
    try:
        return float(_scorer(generator, config).score_answer(answer, entry))
    except Exception as error:
        # Some scorers convert without a check: an error such as int("seven") means a wrong answer.
        logger.debug("%s: score_answer raised %r for %.80r", generator, error, answer)
        return 0.0


@lru_cache(maxsize=16)
def _scorer(generator: str, config: str) -> Any:
    # Scoring uses only the generator's settings, so one problem is enough.
    return make_generator(generator, json.loads(config), size=1, seed=0)


def make_generator(generator: str, config: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Returns a ``reasoning_gym`` dataset of ``size`` problems.

    Raises ``ConfigurationError`` if the package, the generator or a setting does not exist.
    """
    try:
        import reasoning_gym
        from reasoning_gym import factory
    except ImportError as error:
        raise missing_extra(f"problems of {generator}", error, "rl") from error
    if generator not in factory.DATASETS:
        raise ConfigurationError(
            f"generator: got {generator!r}, expected one of the {len(factory.DATASETS)} in "
            f"reasoning_gym.factory.DATASETS{nearest(generator, factory.DATASETS)}"
        )
    try:
        return reasoning_gym.create_dataset(generator, size=size, seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"config: {generator} refuses {dict(config)}: {error}; its settings are "
            f"{', '.join(vars(factory.DATASETS[generator][1]()))}"
        ) from error


class _Entries(Sequence[Entry]):
    """Some of a generator's problems, which are generated on access."""

    def __init__(self, dataset: Any, indices: range) -> None:
        self._dataset, self._indices = dataset, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._indices[index]]


@chz.chz
class ReasoningGymDatasetBuilder(ProblemDatasetBuilder):
    """Problems of one generator, disjoint for training and evaluation.

    Problem i of a generator depends only on its seed and i. Evaluation uses the indices after those
    of training; a generator with few different problems may still repeat one.
    """

    generator: str = chz.field(doc="Name of the generator")
    size: int = number(1000, "Problems to train on", low=1)
    num_test: int = number(50, "Problems to evaluate on; 0: no evaluation")
    config: dict[str, Any] = chz.field(default_factory=dict, doc="Settings of the generator")
    answer_tag: str | None = chz.field(
        default="answer", doc="Tag around the answer; None: use the whole reply"
    )
    format_coef: float = chz.field(default=0.1, doc="Penalty for a wrong format")

    def check(self) -> None:
        """Raises ``ConfigurationError`` for a generator or a setting that does not exist."""
        self._generator()

    def load(self) -> tuple[Sequence[Entry], Sequence[Entry]]:
        """Returns both parts; problems are generated batch by batch."""
        problems, size = self._generator(), self.size
        test = range(size, size + self.num_test)
        return _Entries(problems, range(size)), _Entries(problems, test)

    def _generator(self) -> Any:
        # One generator for both parts: problem i depends on the seed and i, so they are disjoint.
        size = self.size + self.num_test
        return make_generator(self.generator, self.config, size=size, seed=self.seed)

    def env_thunk(self, problem: Entry, renderer: Renderer) -> Callable[[], Env]:
        """Returns the environment of a problem."""
        return partial(
            ReasoningGymEnv,
            self.generator,
            problem,
            renderer,
            config=self.config,
            answer_tag=self.answer_tag,
            format_coef=self.format_coef,
        )

    def tag(self, problem: Entry) -> str:
        """Returns the generator's name."""
        return self.generator
