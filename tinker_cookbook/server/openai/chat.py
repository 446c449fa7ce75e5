"""``POST /chat/completions``: the next message of a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from tinker_cookbook.engine.sampling.requests import PromptScores, Sample
from tinker_cookbook.renderers import StreamingTextDelta, StreamingThinkingDelta
from tinker_cookbook.renderers.core.messages import Message, ToolCall, get_text_content
from tinker_cookbook.renderers.core.parsing import ContentDelta, MessageReader
from tinker_cookbook.server.access import OwnerDep
from tinker_cookbook.server.bodies import json_body_schema, parse_json, read_body
from tinker_cookbook.server.keys import Owner
from tinker_cookbook.server.openai.bodies import ChatBody
from tinker_cookbook.server.openai.errors import OpenAIRoute
from tinker_cookbook.server.openai.messages import prompt_tokens
from tinker_cookbook.server.openai.sample_requests import Asked, envelope, json_safe_logprob
from tinker_cookbook.server.openai.samplers import Gateway, GatewayDep
from tinker_cookbook.server.openai.sampling import Drawing
from tinker_cookbook.server.openai.streaming import Answer
from tinker_cookbook.server.openai.text import Placed, SampledToken, token_bytes

router = APIRouter(route_class=OpenAIRoute)


@router.post("/chat/completions", openapi_extra=json_body_schema(ChatBody))
async def chat_completions(request: Request, owner: OwnerDep, gateway: GatewayDep) -> Response:
    """Answers to a conversation."""
    raw = await read_body(request, request.app.state.max_request_bytes)
    body = await parse_json(raw, lambda: ChatBody.read(raw))
    answer = await gateway.run(_answer, gateway, owner, body)
    return await answer.respond(request, bool(body.stream))


def _answer(gateway: Gateway, owner: Owner, body: ChatBody) -> Answer:
    opened = gateway.open(owner, body.model)
    renderer = gateway.renderer(opened, body.renderer_name)
    tokens = prompt_tokens(renderer, body.messages, body.tools or [])
    asked = Asked.of(body, opened, body.most_tokens, renderer.get_stop_sequences())
    # Not a ``response_parser``: it takes tokens, and a stop string may end within one.
    choices = [ChatChoice(i, asked, renderer.message_reader()) for i in range(asked.num_samples)]
    return Answer(
        envelope("chatcmpl", "chat.completion.chunk", body.model),
        "chat.completion",
        choices,
        Drawing(gateway, [asked.request(tokens)]),
        body.include_usage,
    )


class ChatChoice:
    """One answer: text, thinking and tool calls as the chat format writes them."""

    def __init__(self, index: int, asked: Asked, reader: MessageReader) -> None:
        self._index, self._asked, self._reader = index, asked, reader
        self._drawn = asked.text()
        self._placed: list[Placed] = []
        self._message: dict[str, Any] = {}
        self._finish: str | None = None

    def begin(self, scores: PromptScores | None) -> list[dict[str, Any]]:
        """Whose message it is."""
        return [self._chunk({"role": "assistant", "content": ""}, [])]

    def add(self, drawn: Sequence[SampledToken]) -> dict[str, Any] | None:
        """More text and thinking. Calls come whole, in the end."""
        text = self._drawn.add(drawn)
        delta = _content(self._reader.feed(text)) if text else {}
        placed = self._taken()
        sent = delta or (placed and self._asked.topk is not None)
        return self._chunk(delta, placed) if sent else None

    def end(self, sample: Sample) -> list[dict[str, Any]]:
        """The rest, calls, and why it ends."""
        text = self._drawn.finish()
        deltas = [*(self._reader.feed(text) if text else []), *self._reader.finish()]
        found = self._reader.message()
        # A call that cannot be read is said as the text that it is.
        unread = "".join(call.raw_text for call in found.get("unparsed_tool_calls", []))
        calls = [_call(call) for call in found.get("tool_calls", [])]
        self._message = _message(found, unread, calls)
        delta = _content(deltas)
        if unread:
            delta["content"] = delta.get("content", "") + unread
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        placed = self._taken()
        sent = [self._chunk(delta, placed)] if delta or placed else []
        stopped = self._drawn.stopped or sample.stop_reason == "stop"
        self._finish = ("tool_calls" if calls else "stop") if stopped else "length"
        return [*sent, self._chunk({}, [])]

    def whole(self) -> dict[str, Any]:
        """All of it."""
        return {
            "index": self._index,
            "message": self._message,
            "logprobs": self._logprobs(self._placed),
            "finish_reason": self._finish,
        }

    def _taken(self) -> list[Placed]:
        placed = self._drawn.placed()
        self._placed += placed
        return placed

    def _chunk(self, delta: dict[str, Any], placed: Sequence[Placed]) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": self._logprobs(placed) if placed else None,
            "finish_reason": self._finish,
        }

    def _logprobs(self, placed: Sequence[Placed]) -> dict[str, Any] | None:
        if self._asked.topk is None:
            return None
        return {"content": [self._token(one.drawn) for one in placed], "refusal": None}

    def _token(self, drawn: SampledToken) -> dict[str, Any]:
        assert drawn.logprob is not None
        top = []
        if drawn.top is not None:
            pairs = zip(drawn.top[0].tolist(), drawn.top[1].tolist(), strict=True)
            top = [self._spelled(token, logprob) for token, logprob in pairs]
        return {**self._spelled(drawn.token, drawn.logprob), "top_logprobs": top}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        codec = self._asked.opened.codec
        return {
            "token": codec.decode([token]),
            "logprob": json_safe_logprob(logprob),
            "bytes": token_bytes(codec, token),
        }


def _content(deltas: Iterable[ContentDelta]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for delta in deltas:
        if isinstance(delta, StreamingTextDelta):
            found["content"] = found.get("content", "") + delta.text
        elif isinstance(delta, StreamingThinkingDelta):
            found["reasoning_content"] = found.get("reasoning_content", "") + delta.thinking
    return found


def _message(found: Message, unread: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    text = get_text_content(found) + unread
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
    }
    content = found["content"]
    if not isinstance(content, str):
        thoughts = "".join(part["thinking"] for part in content if part["type"] == "thinking")
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": call.function.model_dump(),
    }
