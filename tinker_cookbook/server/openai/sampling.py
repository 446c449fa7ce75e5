"""Requests to the engine as the event loop sees them: tokens as they come, then the samples."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from fastapi import Request

from tinker_cookbook.engine.sampling.requests import (
    PromptScores,
    Sample,
    SampleRequest,
    ScoreRequest,
)
from tinker_cookbook.server.openai.errors import CLIENT_GONE, ApiError
from tinker_cookbook.server.openai.samplers import Gateway
from tinker_cookbook.server.openai.text import SampledToken

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """Tokens of one answer."""

    choice: int
    drawn: Sequence[SampledToken]


_Arrived: TypeAlias = "tuple[int, SampledToken] | None"


@dataclass(eq=False)
class Drawing:
    """The requests of one call, one a prompt; answers are numbered through all of them.

    To be used on the event loop alone. ``close`` takes back what has not ended.
    """

    gateway: Gateway
    requests: Sequence[SampleRequest]
    scoring: Sequence[ScoreRequest] = ()
    """For each prompt, if the log-probabilities of prompts are asked for."""
    _queue: asyncio.Queue[_Arrived] = field(default_factory=asyncio.Queue)
    _futures: list[Future[list[Sample]]] = field(default_factory=list)
    _size: int = 0

    def start(self, streamed: bool) -> None:
        """Hands the requests to the engine; raises ``Busy`` where too many samples wait."""
        size = sum(request.num_samples for request in self.requests)
        self.gateway.host.sample_quota.acquire(size)
        self._size, first = size, 0
        post = _poster(self._queue)
        for i, request in enumerate(self.requests):
            if streamed:
                request.on_token = _hook(post, first)
            first += request.num_samples
            self._futures.append(self._submit(request, i))
            if streamed:
                self._futures[-1].add_done_callback(lambda _: post(None))

    def _submit(self, request: SampleRequest, index: int) -> Future[list[Sample]]:
        engine = self.gateway.host.engine
        if not self.scoring:
            return engine.sample(request)
        score = self.scoring[index]
        if request.limit > 1:
            engine.score(score)
            return engine.sample(request)
        score.draw = request  # the pass that scores a prompt knows the token after it too
        engine.score(score)
        return request.future

    async def prompt_scores(self) -> list[PromptScores] | None:
        """What is known of each prompt's tokens; None where it was not asked for."""
        if not self.scoring:
            return None
        return await asyncio.gather(*(asyncio.wrap_future(one.future) for one in self.scoring))

    async def samples(self) -> list[Sample]:
        """All samples, in order, once they are done; raises what kept one from being drawn."""
        parts = await asyncio.gather(*map(asyncio.wrap_future, self._futures))
        return [sample for part in parts for sample in part]

    async def events(self) -> AsyncIterator[list[Event]]:
        """Tokens as they come, those at hand together. Ends when all is drawn."""
        left = len(self._futures)
        while left:
            arrived = [await self._queue.get()]
            while not self._queue.empty():
                arrived.append(self._queue.get_nowait())
            by_choice: dict[int, list[SampledToken]] = {}
            for one in arrived:
                if one is None:
                    left -= 1
                else:
                    by_choice.setdefault(one[0], []).append(one[1])
            self._raise_failures()
            if by_choice:
                yield [Event(choice, drawn) for choice, drawn in by_choice.items()]

    def close(self) -> None:
        """Cancels what runs. May be called more than once."""
        for future in (*self._futures, *(one.future for one in self.scoring)):
            future.cancel()
        self.gateway.host.sample_quota.release(self._size)
        self._size = 0

    def _raise_failures(self) -> None:
        for future in self._futures:
            if future.done():
                if future.cancelled():
                    raise CancelledError
                if (error := future.exception()) is not None:
                    raise error


def _poster(queue: asyncio.Queue[_Arrived]) -> Callable[[_Arrived], None]:
    loop = asyncio.get_running_loop()

    def post(what: _Arrived) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(queue.put_nowait, what)

    return post


def _hook(post: Callable[[_Arrived], None], first: int) -> Callable[[int, Sample], None]:
    # Knows the queue alone: the request must not hold what holds it.
    def on_token(row: int, sample: Sample) -> None:
        top = sample.topk[-1] if sample.topk else None
        post((first + row, SampledToken(sample.tokens[-1], sample.logprobs[-1], top)))

    return on_token


def sampled_tokens(sample: Sample) -> list[SampledToken]:
    """The tokens of a finished sample."""
    tops: Sequence[Any] = sample.topk or [None] * len(sample.tokens)
    return [
        SampledToken(token, logprob, top)
        for token, logprob, top in zip(sample.tokens, sample.logprobs, tops, strict=True)
    ]


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """``await work``, cancelled when the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client has gone", status=CLIENT_GONE)
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
