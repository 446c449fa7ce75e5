"""Runs the problems of one benchmark: samples, grades and stores answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tinker_cookbook.eval.run.answer_record import AnswerRecord
from tinker_cookbook.eval.run.answers import AnswerFile, response_of
from tinker_cookbook.eval.run.examples import Example, grade_response
from tinker_cookbook.eval.run.sources import (
    Answer,
    AnswerSource,
    Prompt,
    example_seed,
    messages_text,
)
from tinker_cookbook.eval.run.types import (
    METRIC_CONTEXT_OVERFLOW,
    METRIC_MAX_TOKENS_REACHED,
    BenchmarkConfig,
    StoredTrajectory,
    StoredTurn,
)
from tinker_cookbook.exceptions import (
    ConfigurationError,
    EvalError,
    EvalGradingError,
    EvalTimeoutError,
    RendererError,
)
from tinker_cookbook.record.episodes import episode_of_answers
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.rollouts.async_utils import bounded, gather_or_cancel
from tinker_cookbook.utils.chat_api import ContextOverflowError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HOPELESS = 8
"""Number of failed requests, without any success, after which a run ends."""

_SAMPLING, _GRADING = "sampling: ", "grading: "
"""Prefix of ``StoredTrajectory.error``."""


class Progress(Protocol):
    """Shows the progress of a benchmark."""

    def start(self, name: str, total: int, done: int) -> None:
        """Called once the number of problems is known; ``done`` of them were stored before."""

    def update(self, rows: Sequence[StoredTrajectory], stored: bool) -> None:
        """Called when a problem is done; ``stored``: whether its answers were stored before."""


class BenchmarkRun:
    """Runs the problems of one benchmark, ``concurrency`` of them at the same time."""

    file: AnswerFile
    """Set after ``prepare``, whose result is part of its key."""
    items: Sequence[Any]
    """The problems; set by ``prepare``."""
    record: AnswerRecord
    """Gets the tokens of the answers."""

    def __init__(
        self,
        builder: Any,
        source: AnswerSource,
        config: BenchmarkConfig,
        progress: Progress | None,
    ) -> None:
        self.builder, self.source, self.config = builder, source, config
        self._progress = progress
        self._logged: set[type[Exception]] = set()
        self._timeout = max(config.timeout_seconds, builder.recommended_timeout)
        self._failed = 0
        self._succeeded = False

    @abstractmethod
    async def prepare(self) -> dict[str, Any]:
        """Loads the problems; returns further parts of the key, besides model and sampling."""

    @abstractmethod
    def is_done(self, item: Any) -> bool:
        """Returns whether all answers to a problem were stored before."""

    @abstractmethod
    async def work(self, position: int, item: Any) -> list[StoredTrajectory]:
        """Returns the answers to a problem, stored ones or new ones."""

    async def run(self) -> list[StoredTrajectory]:
        """Returns the answers to all problems, in order."""
        if self._progress is not None:
            done = sum(map(self.is_done, self.items))
            self._progress.start(self.builder.name, len(self.items), done)
        found: dict[int, list[StoredTrajectory]] = {}
        waiting = iter(enumerate(self.items))

        async def worker() -> None:
            # All workers share the iterator: a free worker takes the next item.
            for position, item in waiting:
                stored = self.is_done(item)
                found[position] = await self.work(position, item)
                if self._progress is not None:
                    self._progress.update(found[position], stored)

        limit = self.config.concurrency
        if self.builder.multi_turn:
            limit = self.config.agent_concurrency
        await gather_or_cancel(worker() for _ in range(min(limit, len(self.items))))
        return [row for position in sorted(found) for row in found[position]]

    async def store(self, row: StoredTrajectory) -> StoredTrajectory:
        """Stores an answer."""
        await asyncio.to_thread(self.file.add, row)
        return row

    async def attempt(
        self, row: StoredTrajectory, work: Awaitable[T], *raised: type[Exception]
    ) -> T | None:
        """Returns the result of a request; if it fails, sets the row's error and returns ``None``.

        Sets the row's time too. Errors of the types ``raised`` are not failures.

        Raises:
            ConfigurationError: All requests would have this error.
            EvalError: No request has ever succeeded.
        """
        started = time.monotonic()
        try:
            result = await bounded(work, self._timeout, self.timeout)
        except (ConfigurationError, *raised):
            raise
        except Exception as error:
            row.error = self._failed_text(error, row)
            return None
        finally:
            row.time_seconds = time.monotonic() - started
        self._succeeded = True
        return result

    def _failed_text(self, error: Exception, row: StoredTrajectory) -> str:
        before = self.file.rows.get((row.example_id, row.sample))
        # What failed in an earlier start may fail again, and the run should end as it did then.
        self._failed += before is None or before.error is None
        ungraded = isinstance(error, EvalGradingError)
        if self._failed >= _HOPELESS and not self._succeeded:
            what = "answers could not be graded" if ungraded else "requests failed"
            raise EvalError(
                f"{self.builder.name}: the first {self._failed} {what}, the last one with "
                f"{type(error).__name__}: {error}"
            ) from error
        return f"{_GRADING if ungraded else _SAMPLING}{type(error).__name__}: {error}"

    def timeout(self) -> EvalTimeoutError:
        """Returns the error for an example that exceeded the time limit."""
        return EvalTimeoutError(
            f"took more than timeout_seconds={self._timeout:g}; raise it, or lower concurrency"
        )


class ExampleRun(BenchmarkRun):
    """Samples and grades answers to single questions."""

    async def prepare(self) -> dict[str, Any]:
        """Returns the key of the first prompt: another system prompt or format changes it.

        Without it, readers would also see answers to the old prompts, of problems that are not
        answered again.
        """
        self.items = await asyncio.to_thread(self.builder.examples, self.config)
        _, prompt = await self._prompt(self.items[0])
        return {"first_prompt": prompt.key}

    def grader(self, example: Example) -> str:
        """Version of the grader and digest of the expected answer, which the file of the questions
        may correct; ``""`` for a user's function, because its version is unknown."""
        if self.config.grade_fn:
            return ""
        expected = json.dumps(example.expected, sort_keys=True, default=repr)
        digest = hashlib.sha256(expected.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        return f"{self.builder.grader_version}:{digest}"

    def is_done(self, item: Example) -> bool:
        """Returns whether each sample has a graded answer."""
        rows = [self.file.rows.get((item.example_id, i)) for i in range(self.config.num_samples)]
        return all(row is not None and row.error is None for row in rows)

    async def _prompt(self, example: Example) -> tuple[list[Message], Prompt]:
        messages = self.builder.prompt_messages(example, self.config)
        try:
            return messages, await asyncio.to_thread(self.source.render, messages)
        except RendererError as error:  # such as an image of a shape that the model does not take
            raise RendererError(f"{self.builder.name}/{example.example_id}: {error}") from error

    async def work(self, position: int, item: Example) -> list[StoredTrajectory]:
        """Returns the answers to one problem: stored answers, regraded if needed, and new ones."""
        messages, prompt = await self._prompt(item)
        wanted = range(self.config.num_samples)
        stored = {i: self._reusable(item, i, prompt) for i in wanted}
        missing = [i for i in wanted if stored[i] is None]
        rows = [row for row in stored.values() if row is not None]
        if missing:
            rows += await self._sample(position, item, messages, prompt, missing)
        graded = await asyncio.gather(*(self._graded(row, item) for row in rows))
        return sorted(graded, key=lambda row: row.sample)

    def _reusable(self, example: Example, sample: int, prompt: Prompt) -> StoredTrajectory | None:
        row = self.file.rows.get((example.example_id, sample))
        # Failed requests are repeated; an answer that could not be graded is still reused.
        if row is None or row.prompt_key != prompt.key or (row.error or "").startswith(_SAMPLING):
            return None
        return row

    async def _sample(
        self,
        position: int,
        example: Example,
        messages: list[Message],
        prompt: Prompt,
        missing: Sequence[int],
    ) -> list[StoredTrajectory]:
        """Returns new, ungraded rows for the ``missing`` samples."""
        row = StoredTrajectory(
            idx=position,
            benchmark=self.builder.name,
            example_id=example.example_id,
            turns=prompt_turns(messages, prompt.num_tokens),
            logs=dict(example.logs),
            sample=missing[0],
            prompt_key=prompt.key,
        )
        seed = example_seed(self.config.seed, example.example_id, missing[0])
        try:
            work = self.source.sample(prompt, len(missing), seed)
            answers = await self.attempt(row, work, ContextOverflowError)
        except ContextOverflowError as error:
            row.metrics, row.grader = {METRIC_CONTEXT_OVERFLOW: 1.0}, self.grader(example)
            row.logs["context_overflow"] = str(error)
            return [await self.store(replace(row, sample=i)) for i in missing]
        if answers is None:
            return [await self.store(replace(row, sample=i)) for i in missing]
        for i, answer in zip(missing, answers, strict=True):
            if answer.sampled is not None and answer.message is not None:
                talk = [*messages, answer.message]
                episode = episode_of_answers([(prompt.value, answer.sampled)], talk)
                self.record.add(replace(row, sample=i), episode)
        return [
            replace(
                row,
                sample=i,
                turns=[*row.turns, answer_turn(answer)],
                metrics={METRIC_MAX_TOKENS_REACHED: float(answer.truncated)},
                logs=dict(row.logs),
                error=f"{_GRADING}not yet",
            )
            for i, answer in zip(missing, answers, strict=True)
        ]

    async def _graded(self, row: StoredTrajectory, example: Example) -> StoredTrajectory:
        """Returns the row with a grade; a graded row is returned unchanged."""
        grader = self.grader(example)
        ungraded = row.error is not None or not grader or row.grader != grader
        overflow = METRIC_CONTEXT_OVERFLOW in row.metrics
        if not ungraded or overflow or (row.error or "").startswith(_SAMPLING):
            return row
        row = replace(row, grader=grader, logs=dict(example.logs), error=None)
        truncated = row.metrics.get(METRIC_MAX_TOKENS_REACHED, 0.0)
        try:
            work = grade_response(self.builder, response_of(row), example, self.config)
            grade = await bounded(work, self._timeout, self.timeout)
        except ConfigurationError:
            raise  # a missing package affects all answers
        except Exception as error:
            # Each answer may fail in the same way; the rows of the results have all errors.
            if type(error) not in self._logged:
                self._logged.add(type(error))
                place = f"{row.benchmark}/{row.example_id}"
                logger.warning("%s: %s", place, error, exc_info=True)
            row.reward, row.error = 0.0, f"{_GRADING}{type(error).__name__}: {error}"
        else:
            row.reward = float(grade.reward)
            row.metrics = {**grade.metrics, METRIC_MAX_TOKENS_REACHED: truncated}
            row.logs.update(grade.logs)
        return await self.store(row)


def prompt_turns(messages: Sequence[Message], num_tokens: int | None) -> list[StoredTurn]:
    """Returns the turns of a prompt; the last turn has the token count of the whole prompt."""
    turns = [
        StoredTurn(
            role="assistant" if role == "assistant" else "user",
            content=text,
            metadata={} if role in ("user", "assistant") else {"role": role},
        )
        for role, text in messages_text(messages)
    ]
    if turns:
        turns[-1].token_count = num_tokens or 0
    return turns


def answer_turn(answer: Answer) -> StoredTurn:
    """Returns the turn of a response."""
    metadata = {"thinking": answer.thinking} if answer.thinking else {}
    return StoredTurn("assistant", answer.text, answer.num_tokens, metadata)
