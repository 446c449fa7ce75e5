"""Answers, whole or as server-sent events. Both kinds of request differ only in their choices."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinker_cookbook.engine.sampling.requests import PromptScores, Sample
from tinker_cookbook.server.openai.errors import as_api_error
from tinker_cookbook.server.openai.sampling import Drawing, Event, sampled_tokens, unless_gone
from tinker_cookbook.server.openai.text import SampledToken

logger = logging.getLogger(__name__)


class Choice(Protocol):
    """One answer of a response: fed with tokens, it says what to send of them."""

    def begin(self, scores: PromptScores | None) -> list[dict[str, Any]]:
        """What a stream sends before any token, given what was asked of the prompt's."""
        ...

    def add(self, drawn: Sequence[SampledToken]) -> dict[str, Any] | None:
        """What a stream sends of more tokens; None while nothing is certain."""
        ...

    def end(self, sample: Sample) -> list[dict[str, Any]]:
        """What a stream sends last; the finish reason in the end."""
        ...

    def whole(self) -> dict[str, Any]:
        """The whole answer, after ``end``."""
        ...


@dataclass
class Answer:
    """All answers of one call, and what stands around them."""

    envelope: dict[str, Any]
    """``id``, ``object``, ``created``, ``model``: of every chunk."""
    whole_object: str
    """``object`` of an answer in one piece."""
    choices: Sequence[Choice]
    drawing: Drawing
    include_usage: bool
    drop_tokens: bool = False
    """The tokens were not asked for: the engine draws one at least."""

    async def respond(self, request: Request, stream: bool) -> Response:
        """Draws, and sends what comes of it."""
        try:
            self.drawing.start(streamed=stream)
            scores = await unless_gone(request, self.drawing.prompt_scores())
            begun = self._begin(scores)
            if stream:
                return await self._streamed(request, begun)
            samples = await unless_gone(request, self.drawing.samples())
        except BaseException:
            self.drawing.close()
            raise
        self.drawing.close()
        for choice, sample in zip(self.choices, samples, strict=True):
            if not self.drop_tokens:
                choice.add(sampled_tokens(sample))
            choice.end(sample)
        return JSONResponse(
            {
                **self.envelope,
                "object": self.whole_object,
                "choices": [choice.whole() for choice in self.choices],
                "usage": self._usage(samples),
            }
        )

    def _begin(self, scores: Sequence[PromptScores] | None) -> list[dict[str, Any]]:
        each = len(self.choices) // len(self.drawing.requests)
        found = []
        for i, choice in enumerate(self.choices):
            found += choice.begin(None if scores is None else scores[i // each])
        return found

    async def _streamed(self, request: Request, begun: list[dict[str, Any]]) -> Response:
        events = self.drawing.events()
        # What the engine refuses is said with a status, so the first token comes before it.
        first = await unless_gone(request, anext(events, None))
        return _Sse(self._chunks(begun, first or [], events), self.drawing)

    async def _chunks(
        self,
        begun: list[dict[str, Any]],
        first: list[Event],
        events: AsyncIterator[list[Event]],
    ) -> AsyncIterator[str]:
        try:
            for sent in begun:
                yield self._chunk([sent])
            for sent in self._sent(first):
                yield sent
            async for more in events:
                for sent in self._sent(more):
                    yield sent
            samples = await self.drawing.samples()
            for choice, sample in zip(self.choices, samples, strict=True):
                for sent in choice.end(sample):
                    yield self._chunk([sent])
            if self.include_usage:
                yield self._chunk([], self._usage(samples))
        except Exception as error:
            # The status is sent: clients look for an error in the stream.
            logger.exception("a stream ends with an error")
            yield _event(as_api_error(error).body())
        yield "data: [DONE]\n\n"

    def _sent(self, events: Sequence[Event]) -> list[str]:
        found = []
        for event in events:
            sent = None if self.drop_tokens else self.choices[event.choice].add(event.drawn)
            if sent is not None:
                found.append(self._chunk([sent]))
        return found

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        body = {**self.envelope, "choices": choices}
        return _event({**body, "usage": usage} if self.include_usage else body)

    def _usage(self, samples: Sequence[Sample]) -> dict[str, Any]:
        requests = self.drawing.requests
        prompt = sum(len(request.prompt) for request in requests)
        drawn = 0 if self.drop_tokens else sum(len(sample.tokens) for sample in samples)
        first_of_each, at = 0, 0
        for request in requests:
            first_of_each += samples[at].cached_prompt_tokens
            at += request.num_samples
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": first_of_each},
        }


class _Sse(StreamingResponse):
    """Server-sent events; what is drawn for them ends with the connection."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[str], drawing: Drawing) -> None:
        # Proxies would otherwise collect the chunks.
        super().__init__(chunks, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._drawing = drawing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Here and not in the generator, which never runs if the client has gone before.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._drawing.close()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
