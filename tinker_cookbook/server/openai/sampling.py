"""Sampling for the OpenAI API, and its responses: complete, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import ClassVar, TypeAlias, TypeVar

import numpy as np
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinker_cookbook.backends.convert import TokenSequence
from tinker_cookbook.engine.sampling.options import SamplingSettings, TokenMask
from tinker_cookbook.engine.sampling.requests import (
    PromptScores,
    Sample,
    sample_request,
    score_request,
)
from tinker_cookbook.engine.training.examples import check_token_range
from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.openai.models import LoadedModel
from tinker_cookbook.server.openai.protocol import ApiError, SamplingBody, as_api_error
from tinker_cookbook.server.openai.text import IncrementalDetokenizer, SampledToken
from tinker_cookbook.server.requests import Usage
from tinker_cookbook.server.state import ServerState

logger = logging.getLogger(__name__)

T = TypeVar("T")
# New tokens by the index of their choice.
TokenBatch: TypeAlias = dict[int, list[SampledToken]]

# Replaces minus infinity, which JSON does not have.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class SamplingOptions:
    """Model and sampling parameters of a request."""

    model: LoadedModel
    settings: SamplingSettings
    num_samples: int
    top_logprobs: int | None
    """Number of alternatives per token; None: no log-probabilities."""
    best_of: int | None = None
    """Number of samples; the ``num_samples`` most probable ones are returned."""
    token_ids: bool = False
    """Whether choices have ``token_ids``: all sampled tokens, including stop tokens."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name a token as ``token_id:ID`` instead of by its text."""

    @classmethod
    def of(
        cls,
        body: SamplingBody,
        model: LoadedModel,
        max_tokens: int | None,
        top_logprobs: int | None,
        stop: Sequence[int | str] = (),
        mask: TokenMask | None = None,
    ) -> SamplingOptions:
        """Returns the options of ``body``; ``stop`` adds stop tokens and strings to its own.

        ``mask``: the answer's; default: that of the body's constraints on its text.
        """
        if mask is None and body.constrains_text:
            constraints = load_leaf("server.openai.constraints", "response_format")
            mask = constraints.completion_mask(body, model)
        base = model.sampler.base
        strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if stop_ids := body.stop_token_ids or []:
            check_token_range("stop_token_ids", np.array(stop_ids), base.vocab_size)
        stops = [*strings, *stop_ids, *stop] or None
        settings = SamplingSettings.of(
            body, base.eos_ids, max_tokens=max_tokens, stop=stops, token_mask=mask
        )
        top = None if top_logprobs is None else min(top_logprobs, base.vocab_size)
        # The names are parameters of vLLM's server, which /responses does not have.
        names = "return_token_ids", "return_tokens_as_token_ids"
        flags = (bool(getattr(body, name, None)) for name in names)
        return cls(model, settings, body.n or 1, top, None, *flags)


def json_safe_logprob(logprob: float) -> float:
    """Clamps a log-probability to a finite number for JSON."""
    return max(float(logprob), LOWEST_LOGPROB)


class Choice:
    """Choice of a response, built from its tokens."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, index: int, options: SamplingOptions) -> None:
        self._index, self._options = index, options
        settings = options.settings
        self._detokenizer = IncrementalDetokenizer(
            options.model.codec,
            settings.stop_tokens,
            settings.stop_strings,
            settings.min_tokens,
            options.token_ids,
        )
        self._tokens: list[SampledToken] = []
        self._finish_reason: str | None = None

    def begin(self, scores: PromptScores | None) -> list[Json]:
        """Returns the chunks before the first token; ``scores`` has the prompt's logprobs."""
        return []

    def add(self, tokens: Sequence[SampledToken]) -> Json | None:
        """Adds tokens; returns a chunk with the text that can no longer change, or None."""
        raise NotImplementedError

    def end(self, stop_reason: str) -> list[Json]:
        """Returns the last chunks, with the finish reason."""
        raise NotImplementedError

    def whole(self) -> Json:
        """Returns the choice for a non-streamed response."""
        raise NotImplementedError

    def _json(
        self, fields: Json, logprobs: Json | None, tokens: Sequence[SampledToken] = ()
    ) -> Json:
        body = {"index": self._index, **fields, "logprobs": logprobs}
        body["finish_reason"] = self._finish_reason
        if self._options.token_ids:
            body["token_ids"] = [token.token for token in tokens]
        return body

    def _name(self, token: int) -> str | None:
        """Returns the name of a token in log-probabilities; None: use its text."""
        return f"token_id:{token}" if self._options.tokens_as_ids else None


@dataclass(eq=False)
class ApiCall:
    """One call of the API: its sampling requests, one for each prompt, and its response.

    ``choices`` are numbered through all prompts.
    """

    state: ServerState
    owner: str
    body: SamplingBody
    options: SamplingOptions
    prompts: Sequence[TokenSequence]
    choices: Sequence[Choice]
    score_prompts: bool = False
    discard_tokens: bool = False
    """Whether no tokens were requested; the engine samples at least one."""
    first_fields: Json = field(default_factory=dict)
    """Fields of the response that are only in the first chunk of a stream."""

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, SampledToken] | None] = asyncio.Queue()
        self._futures: list[Future[list[Sample]]] = []
        self._scores: list[Future[PromptScores]] = []
        self._num_queued = 0
        self._used = Usage(self.options.model.base_model)
        self._usage: Json = {}
        self._envelope: Json = {
            "id": f"{self.choices[0].id_prefix}-{secrets.token_hex(12)}",
            "object": self.choices[0].chunk_name,
            "created": int(time.time()),
            "model": self.body.model,
        }
        # Options that changed the sampling; log-probabilities are still the model's own.
        if adjustments := self.options.settings.in_effect:
            self._envelope["sampling_adjustments"] = list(adjustments)

    async def respond(self, request: Request) -> Response:
        """Samples and returns the response; raises ``BusyError`` if too many samples are queued."""
        # The tokens are added at the end, which for a stream is after this method.
        request.state.usage = self._used
        try:
            await self.start()
            if self.body.stream:
                chunks = self._begin(await until_disconnect(request, _results(self._scores)))
                batches = self.token_batches()
                # The status can report an error of the engine only before the first chunk.
                chunks += self._add(await until_disconnect(request, anext(batches, {})))
                return _EventStream(self._events(self._chunks(chunks, batches)), self.close)
            results = await until_disconnect(request, _results(self._futures))
            self._begin(await _results(self._scores))
        except BaseException:
            self.close()
            raise
        self.close()
        self._count(results)
        # The same choices build a complete response, from all tokens at once.
        for choice, one in self._by_choice(results):
            if not self.discard_tokens:
                tokens = zip(one.tokens, one.logprobs, one.topk or repeat(None), strict=False)
                choice.add([SampledToken(*fields) for fields in tokens])
            choice.end(one.stop_reason)
        return JSONResponse(self._whole())

    async def start(self) -> None:
        """Submits the requests."""
        num_samples = self.options.best_of or self.options.num_samples
        # Acquire all samples of the call at once, so that a refused call starts none of them.
        size = num_samples * len(self.prompts)
        self.state.acquire_samples(self.owner, size)
        self._num_queued = size
        loop, queue = asyncio.get_running_loop(), self._queue

        # These functions run on the engine's threads. They refer only to the queue: a reference to
        # the call would create a reference cycle with its requests.
        def put(item: tuple[int, SampledToken] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def put_token(first: int, index: int, sample: Sample) -> None:
            top = sample.topk[-1] if sample.topk else None
            put((first + index, SampledToken(sample.tokens[-1], sample.logprobs[-1], top)))

        for index, prompt in enumerate(self.prompts):
            await asyncio.sleep(0)  # other requests run between two prompts
            on_token = partial(put_token, index * num_samples) if self.body.stream else None
            future = self._submit(prompt, num_samples, on_token)
            # Marks the end of this prompt's stream, after all of its tokens.
            future.add_done_callback(lambda _: put(None))
            self._futures.append(future)

    def _submit(
        self,
        prompt: TokenSequence,
        num_samples: int,
        on_token: Callable[[int, Sample], None] | None,
    ) -> Future[list[Sample]]:
        model, settings, engine = self.options.model, self.options.settings, self.state.engine
        top = self.options.top_logprobs or 0
        # A single token needs no decode step, so the scoring pass samples it too.
        in_one_pass = self.score_prompts and settings.max_tokens == 1
        request = sample_request(
            model.sampler,
            prompt.tokens,
            num_samples,
            settings,
            images=prompt.images,
            decode=model.codec.decode if settings.stop_strings else None,
            topk_sample=top,
            scored=in_one_pass,
        )
        request.on_token = on_token
        if self.score_prompts:
            score = score_request(
                model.sampler, prompt.tokens, logprobs=True, topk=top, images=prompt.images
            )
            score.sample = request if in_one_pass else None
            self._scores.append(engine.score(score))
        return request.future if in_one_pass else engine.sample(request)

    async def token_batches(self) -> AsyncIterator[TokenBatch]:
        """Yields new tokens as they arrive, until all requests are done; raises their errors."""
        running = len(self._futures)
        while running:
            # Wait for one token, then take all that have arrived, for one chunk per choice.
            arrived = [await self._queue.get()]
            while not self._queue.empty():
                arrived.append(self._queue.get_nowait())
            batch: TokenBatch = {}
            for item in arrived:
                if item is None:
                    running -= 1
                else:
                    batch.setdefault(item[0], []).append(item[1])
            # The first error ends the stream, even if other prompts are still running.
            for future in self._futures:
                if future.done():
                    future.result()
            if batch:
                yield batch

    def close(self) -> None:
        """Cancels the requests that have not ended. May be called more than once."""
        for future in (*self._futures, *self._scores):
            future.cancel()
        # Set to zero, so that a second call does not release the samples again.
        self.state.release_samples(self.owner, self._num_queued)
        self._num_queued = 0

    def _whole(self) -> Json:
        """Returns the body of a non-streamed response from complete choices."""
        return self._envelope | {
            **self.first_fields,
            "object": self.choices[0].object_name,
            "choices": [choice.whole() for choice in self.choices],
            "usage": self._usage,
        }

    def _begin(self, scores: Sequence[PromptScores]) -> list[Json]:
        """Returns the chunks before the first tokens."""
        chunks, num_samples = [], self.options.num_samples
        for i, choice in enumerate(self.choices):
            chunks += choice.begin(scores[i // num_samples] if scores else None)
        return chunks

    def _add(self, batch: TokenBatch) -> list[Json]:
        """Returns the chunks of new tokens."""
        if self.discard_tokens:
            return []
        chunks = (self.choices[index].add(tokens) for index, tokens in batch.items())
        return [chunk for chunk in chunks if chunk is not None]

    def _by_choice(self, results: Sequence[Sequence[Sample]]) -> Iterator[tuple[Choice, Sample]]:
        if self.options.best_of:
            # Highest mean log-probability per token, as in OpenAI's API.
            ordered = (sorted(found, key=_mean_logprob, reverse=True) for found in results)
            results = [found[: self.options.num_samples] for found in ordered]
        return zip(self.choices, chain.from_iterable(results), strict=True)

    async def _chunks(
        self, first: Iterable[Json], batches: AsyncIterator[TokenBatch]
    ) -> AsyncIterator[Json]:
        """Yields the ``first`` chunks, those of all further tokens, and the last ones."""
        for chunk in first:
            yield chunk
        async for batch in batches:
            for chunk in self._add(batch):
                yield chunk
        # The stop reason is known only now, from the complete responses.
        results = await _results(self._futures)
        self._count(results)
        for choice, sample in self._by_choice(results):
            for chunk in choice.end(sample.stop_reason):
                yield chunk

    async def _events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
        """Yields server-sent events: one for each chunk, and the usage."""
        options = self.body.stream_options
        include_usage = options is not None and options.include_usage

        def event(choices: list[Json], usage: Json | None = None) -> str:
            body = {**self._envelope, **fields, "choices": choices}
            return _event({**body, "usage": usage} if include_usage else body)

        fields = self.first_fields
        try:
            async for chunk in chunks:
                yield event([chunk])
                fields = {}
            if include_usage:
                yield event([], self._usage)
        except Exception as error:
            # The status was already sent, so report the error in the stream.
            logger.exception("a stream ends with an error")
            yield _event(as_api_error(error).body())
        # Clients read up to this line.
        yield "data: [DONE]\n\n"

    def _count(self, results: Sequence[Sequence[Sample]]) -> None:
        """Sets the usage."""
        prompt = sum(len(one.tokens) for one in self.prompts)
        sampled = sum(len(one.tokens) for one in chain.from_iterable(results))
        sampled = 0 if self.discard_tokens else sampled
        self._used.tokens_in, self._used.tokens_out = prompt, sampled
        cached = sum(found[0].cached_prompt_tokens for found in results)
        self._usage = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _mean_logprob(sample: Sample) -> float:
    return float(np.mean(sample.logprobs or [0.0]))


async def _results(futures: Sequence[Future[T]]) -> list[T]:
    """Waits for all futures; raises the first error."""
    return await asyncio.gather(*map(asyncio.wrap_future, futures))


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Awaits ``work``, and cancels it if the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    # Both tasks end here in any case, also if the server cancels the request.
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client has disconnected", status=499)  # as in nginx
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events; ``close`` is called at the end, also if the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        # The headers keep proxies from buffering the chunks.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator, which never runs if the client disconnects early.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
