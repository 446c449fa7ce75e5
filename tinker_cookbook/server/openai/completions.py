"""``POST /completions``: text, or tokens, that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from tinker_cookbook.engine.sampling.requests import PromptScores, Sample
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.server.access import OwnerDep
from tinker_cookbook.server.bodies import json_body_schema, parse_json, read_body
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.openai.bodies import CompletionBody
from tinker_cookbook.server.openai.errors import ApiError, OpenAIRoute
from tinker_cookbook.server.openai.sample_requests import Asked, envelope, json_safe_logprob
from tinker_cookbook.server.openai.samplers import Gateway, GatewayDep
from tinker_cookbook.server.openai.sampling import Drawing
from tinker_cookbook.server.openai.streaming import Answer
from tinker_cookbook.server.openai.text import DrawnText, Placed, SampledToken, token_name

router = APIRouter(route_class=OpenAIRoute)


@router.post("/completions", openapi_extra=json_body_schema(CompletionBody))
async def completions(request: Request, owner: OwnerDep, gateway: GatewayDep) -> Response:
    """Continuations of one or several prompts."""
    raw = await read_body(request, request.app.state.max_request_bytes)
    body = await parse_json(raw, lambda: CompletionBody.read(raw))
    answer = await gateway.run(_answer, gateway, owner, body)
    return await answer.respond(request, bool(body.stream))


@dataclass(frozen=True)
class _Prompt:
    tokens: list[int]
    text: str


def _answer(gateway: Gateway, owner: Owner, body: CompletionBody) -> Answer:
    if body.most_tokens == 0 and not body.echo:
        raise ApiError("max_tokens: got 0, expected at least 1 without echo", param="max_tokens")
    opened = gateway.open(owner, body.model)
    asked = Asked.of(body, opened, max(1, body.most_tokens))
    prompts = [_prompt(opened.codec, prompt) for prompt in body.prompts]
    scored = body.echo and asked.topk is not None
    drawing = Drawing(
        gateway,
        [asked.request(prompt.tokens) for prompt in prompts],
        [asked.scoring(prompt.tokens) for prompt in prompts] if scored else (),
    )
    choices = [
        CompletionChoice(i, asked, prompts[i // asked.num_samples] if body.echo else None)
        for i in range(len(prompts) * asked.num_samples)
    ]
    return Answer(
        envelope("cmpl", "text_completion", body.model),
        "text_completion",
        choices,
        drawing,
        body.include_usage,
        drop_tokens=body.most_tokens == 0,
    )


def _prompt(codec: TextCodec, prompt: str | list[int]) -> _Prompt:
    """Text is encoded as the tokenizer does it, with a BOS where it puts one."""
    if isinstance(prompt, str):
        return _Prompt(list(codec.tokenizer.encode(prompt)), prompt)
    return _Prompt(prompt, "")


class CompletionChoice:
    """One continuation, behind its prompt if that is to be repeated."""

    def __init__(self, index: int, asked: Asked, echo: _Prompt | None) -> None:
        self._index, self._asked, self._echo = index, asked, echo
        self._drawn = asked.text()
        self._before = 0  # characters of the prompt
        self._text = ""
        self._placed: list[Placed] = []
        self._finish: str | None = None
        self._any = False

    def begin(self, scores: PromptScores | None) -> list[dict[str, Any]]:
        """The prompt."""
        if self._echo is None:
            return []
        text, placed = _echoed(self._asked, self._echo, scores)
        self._before = len(text)
        return [self._sent(text, placed)]

    def add(self, drawn: Sequence[SampledToken]) -> dict[str, Any] | None:
        """More of the text."""
        self._any = True
        text = self._drawn.add(drawn)
        return self._more(text) if text else None

    def end(self, sample: Sample) -> list[dict[str, Any]]:
        """The rest of the text, and why it ends."""
        text = self._drawn.finish()
        stopped = self._any and (self._drawn.stopped or sample.stop_reason == "stop")
        self._finish = "stop" if stopped else "length"
        return [self._more(text)]

    def whole(self) -> dict[str, Any]:
        """All of it."""
        return self._choice(self._text, self._placed)

    def _more(self, text: str) -> dict[str, Any]:
        placed = self._drawn.placed()
        return self._sent(text, [replace(p, offset=p.offset + self._before) for p in placed])

    def _sent(self, text: str, placed: list[Placed]) -> dict[str, Any]:
        self._text += text
        self._placed += placed
        return self._choice(text, placed)

    def _choice(self, text: str, placed: Sequence[Placed]) -> dict[str, Any]:
        logprobs = None
        if self._asked.topk is not None:
            logprobs = _logprobs(self._asked.opened.codec, placed)
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish,
        }


def _echoed(asked: Asked, prompt: _Prompt, scores: PromptScores | None) -> tuple[str, list[Placed]]:
    """The prompt's text as it was given, and its tokens with their places in it."""
    drawn = [SampledToken(token, None) for token in prompt.tokens]
    if scores is not None and scores.logprobs is not None:
        for i in range(1, len(drawn)):
            top = None
            if scores.topk_ids is not None and scores.topk_logprobs is not None:
                top = (scores.topk_ids[i], scores.topk_logprobs[i])
            drawn[i] = SampledToken(drawn[i].token, float(scores.logprobs[i]), top)
    reading = DrawnText(asked.opened.codec, (), ())
    text = reading.add(drawn) + reading.finish()
    placed = reading.placed()
    if not prompt.text:
        return text, placed
    # A BOS, and the space that some vocabularies begin with, are no part of the text.
    more = len(text) - len(prompt.text)
    return prompt.text, [replace(p, offset=max(0, p.offset - more)) for p in placed]


def _logprobs(codec: TextCodec, placed: Sequence[Placed]) -> dict[str, Any]:
    drawn = [one.drawn for one in placed]
    return {
        "tokens": [token_name(codec, one.token) for one in drawn],
        "token_logprobs": [
            None if one.logprob is None else json_safe_logprob(one.logprob) for one in drawn
        ],
        "top_logprobs": [_top(codec, one) for one in drawn],
        "text_offset": [one.offset for one in placed],
    }


def _top(codec: TextCodec, drawn: SampledToken) -> dict[str, float] | None:
    """The most probable tokens, and the one that was drawn where it is none of them."""
    if drawn.top is None or drawn.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in zip(drawn.top[0].tolist(), drawn.top[1].tolist(), strict=True):
        found.setdefault(token_name(codec, token), json_safe_logprob(logprob))
    found.setdefault(token_name(codec, drawn.token), json_safe_logprob(drawn.logprob))
    return found
