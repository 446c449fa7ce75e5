"""Judges: models that grade an answer by label probabilities or by a text with a score.

A judge never guesses: without a score it raises ``EvalGradingError``, and the caller drops the
answer instead of giving it a reward of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import (
    ConfigurationError,
    DataError,
    EvalGradingError,
    TinkerCookbookError,
)
from tinker_cookbook.judges.labels import LabelRenderer, label_logprobs, normalised
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.rollouts.async_utils import Slots
from tinker_cookbook.run.jsonl import append_row, read_rows
from tinker_cookbook.utils.chat_api import ChatApi, ContextOverflowError

logger = logging.getLogger(__name__)

YES_NO: Mapping[str, float] = {"Yes": 1.0, "No": 0.0}
"""Labels and their scores."""

ReadScore = Callable[[str], float]
"""Reads the score in a judge's text; raises ``EvalGradingError`` if there is none."""

_TOP_LOGPROBS = 20  # the maximum of the OpenAI API


@dataclass(frozen=True)
class Judgement:
    """A score and its source: the judge's text, or the label probabilities."""

    score: float
    text: str


class Judge(ABC):
    """Model that grades one prompt.

    Attributes:
        uses_labels: Whether the prompt must ask for one of ``labels``. Otherwise it asks for a
            text with a score, which the caller's ``read`` finds.
        name: Identity of the judge, without its settings; part of the cache key.
    """

    uses_labels: bool = False
    name: str = ""

    @abstractmethod
    async def __call__(self, messages: list[Message], read: ReadScore) -> Judgement:
        """Grades a prompt; raises ``EvalGradingError`` if there is no score."""


class LabelJudge(Judge):
    """Scores by the probabilities of labels: ``sum(P(label) * values[label])``.

    For Yes and No this is the logistic function of the log-odds. Nothing is sampled.
    """

    uses_labels = True

    def __init__(
        self,
        sampling_client: SamplingClient,
        renderer: Renderer,
        values: Mapping[str, float] = YES_NO,
        name: str = "",
    ) -> None:
        self.sampling_client, self.values, self.name = sampling_client, dict(values), name
        self.labels = LabelRenderer(renderer, list(values))

    async def __call__(self, messages: list[Message], read: ReadScore) -> Judgement:
        """Returns the expected value of the label."""
        # In a thread: rendering a long prompt would block the event loop.
        prompt = await asyncio.to_thread(self.labels.prompt, messages)
        found = await label_logprobs(self.sampling_client, prompt, self.labels.tokens)
        return _expected(found, self.values)


class ChatLabelJudge(Judge):
    """Like ``LabelJudge``, with the ``top_logprobs`` of a chat API's first token.

    A label outside the 20 most probable tokens gets the probability of the last of them.
    Raises ``EvalGradingError`` if none of the labels is among them.
    """

    uses_labels = True

    def __init__(self, api: ChatApi, values: Mapping[str, float] = YES_NO) -> None:
        self.api, self.values = api, dict(values)
        self.name = f"{api.url} {api.model_name}"

    async def __call__(self, messages: list[Message], read: ReadScore) -> Judgement:
        """Returns the expected value of the label."""
        (choice, *_), _ = await self.api.choices(
            _plain(messages), 1, 0.0, logprobs=True, top_logprobs=_TOP_LOGPROBS
        )
        content = (choice.get("logprobs") or {}).get("content") or []
        if not content:
            raise ConfigurationError(
                f"judge: {self.api.url} returns no logprobs, expected top_logprobs of the first "
                "token; set mode=text to read a score from the judge's text"
            )
        top = [
            (str(one["token"]).strip(), float(one["logprob"])) for one in content[0]["top_logprobs"]
        ]
        floor = min(logprob for _, logprob in top)
        # A label may occur twice, with and without a leading space.
        found: dict[str, float] = {}
        for label in self.values:
            matches = [value for token, value in top if token.lower() == label.lower()]
            if matches:
                found[label] = math.log(sum(map(math.exp, matches)))
        if not found:
            raise EvalGradingError(
                f"judge: got {', '.join(repr(token) for token, _ in top[:5])}, … as its most "
                f"probable answers, expected {' or '.join(self.values)}"
            )
        return _expected(normalised({x: found.get(x, floor) for x in self.values}), self.values)


class TextJudge(Judge):
    """Samples a text and reads its score, as the official cookbook does."""

    def __init__(self, completer: MessageCompleter, name: str = "") -> None:
        self.completer, self.name = completer, name

    async def __call__(self, messages: list[Message], read: ReadScore) -> Judgement:
        """Returns what ``read`` finds."""
        text = get_text_content(await self.completer(messages))
        return Judgement(read(text), text)


@dataclass
class ChatApiCompleter(MessageCompleter):
    """Completes messages with a model behind a chat API."""

    api: ChatApi
    max_tokens: int
    temperature: float = 1.0

    async def __call__(self, messages: list[Message]) -> Message:
        """Returns the answer's text."""
        (choice, *_), _ = await self.api.choices(
            _plain(messages), self.max_tokens, self.temperature
        )
        return Message(
            role="assistant", content=str((choice.get("message") or {}).get("content") or "")
        )


class CarefulJudge(Judge):
    """A judge with a cache, a limit on concurrent requests, a timeout, and retries.

    Errors of the backend, timeouts and unreadable verdicts are retried after a pause that doubles.

    Args:
        judge: The judge to call.
        max_concurrency: Concurrent requests.
        max_retries: Attempts after the first one.
        timeout_seconds: Time limit of an attempt.
        cache_path: JSONL file of judgements. It is appended to and survives ``kill -9``; several
            runs may share it. ``None``: judgements are cached in memory only.
        retry_pause_seconds: First pause.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        max_concurrency: int = 64,
        max_retries: int = 3,
        timeout_seconds: float = 300.0,
        cache_path: str | Path | None = None,
        retry_pause_seconds: float = 0.5,
    ) -> None:
        self.judge, self.uses_labels, self.name = judge, judge.uses_labels, judge.name
        self._attempts, self._timeout = max_retries + 1, timeout_seconds
        self._pause, self._slots = retry_pause_seconds, Slots(max_concurrency)
        self._running: dict[tuple[Any, str], asyncio.Task[Judgement]] = {}
        self._path = None if cache_path is None else Path(cache_path).expanduser()
        self._known: dict[str, Judgement] = {}
        """Judgements by the hash of judge and prompt."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for row in read_rows(self._path):
                self._known[row["key"]] = Judgement(row["score"], row["text"])

    async def __call__(self, messages: list[Message], read: ReadScore) -> Judgement:
        """Grades a prompt; raises ``EvalGradingError`` if all attempts failed."""
        value = [self.name, self.uses_labels, [[m["role"], get_text_content(m)] for m in messages]]
        key = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
        if (known := self._known.get(key)) is not None:
            # Read the cached text again, since the caller may now look for another pattern.
            return known if self.uses_labels else Judgement(read(known.text), known.text)
        # Equal answers of a group are graded at the same time and share one request.
        running = asyncio.get_running_loop(), key
        task = self._running.get(running)
        if task is None:
            task = asyncio.create_task(self._attempt_all(messages, read))
            self._running[running] = task
            task.add_done_callback(partial(self._finished, running))
        judgement = await asyncio.shield(task)
        if key not in self._known:
            self._known[key] = judgement
            if self._path is not None:
                row = {"key": key, "score": judgement.score, "text": judgement.text}
                append_row(self._path, row)
        return judgement

    def _finished(self, running: tuple[Any, str], task: asyncio.Task[Judgement]) -> None:
        self._running.pop(running, None)
        if not task.cancelled():
            task.exception()  # asyncio would log an exception that no caller reads

    async def _attempt_all(self, messages: list[Message], read: ReadScore) -> Judgement:
        errors: list[BaseException] = []
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._pause * 2 ** (attempt - 1))
            try:
                async with self._slots.one(), asyncio.timeout(self._timeout):
                    judgement = await self.judge(messages, read)
                if not math.isfinite(judgement.score):
                    raise EvalGradingError(
                        f"judge: got the score {judgement.score}, expected a finite number"
                    )
                return judgement
            except ConfigurationError:
                raise  # every other answer would fail in the same way
            except Exception as error:
                errors.append(error)
                logger.warning("judge: attempt %d failed: %s", attempt + 1, _describe(error))
                # A retry cannot help, for example if the prompt is too long for the judge.
                if isinstance(error, (ContextOverflowError, DataError)):
                    break
        raise EvalGradingError(
            f"judge: no score after {len(errors)} attempts; the last error: {_describe(errors[-1])}"
        ) from errors[-1]


def read_number(pattern: str, low: float, high: float, last: bool = True) -> ReadScore:
    """Returns a function that reads the first group of the last (or first) match of ``pattern``.

    It raises ``EvalGradingError`` unless the group is a finite number from ``low`` to ``high``.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def read(text: str) -> float:
        found = [match.group(1) for match in compiled.finditer(text)]
        chosen = (found[-1] if last else found[0]) if found else ""
        try:
            value = float(chosen)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            raise EvalGradingError(
                f"judge: got {chosen or text[-200:]!r}, expected a rating from {low:g} to {high:g} "
                f"that matches {pattern}; a judge that often fails at this is too weak to judge"
            )
        return value

    return read


def _expected(logprobs: Mapping[str, float], values: Mapping[str, float]) -> Judgement:
    probabilities = {label: math.exp(value) for label, value in logprobs.items()}
    text = ", ".join(f"{label} {p:.4f}" for label, p in probabilities.items())
    return Judgement(sum(p * values[label] for label, p in probabilities.items()), text)


def _plain(messages: list[Message]) -> list[dict[str, Any]]:
    return [{"role": m["role"], "content": get_text_content(m)} for m in messages]


def _describe(error: BaseException) -> str:
    text = str(error) or "no answer in time"
    return text if isinstance(error, TinkerCookbookError) else f"{type(error).__name__}: {text}"
