"""The proxy's routes: the Messages and Chat Completions APIs, bare and below an address.

A request is sampled with the given client inside the scope of its address, so that
:mod:`tinker_cookbook.capture.instrument` records its tokens; nothing here records them.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tinker_cookbook.capture.proxy import messages_api
from tinker_cookbook.capture.proxy.address import parse_address
from tinker_cookbook.capture.proxy.complete import (
    Answer,
    ProxyDeps,
    RendererLike,
    SampledSequenceLike,
    SampleResponseLike,
    SamplingClientLike,
    answer_request,
)
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.openai.protocol import ApiError, ChatBody, as_api_error

__all__ = [
    "ProxyDeps",
    "RendererLike",
    "SampledSequenceLike",
    "SampleResponseLike",
    "SamplingClientLike",
    "make_app",
]

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_DEPS = web.AppKey("proxy_deps", ProxyDeps)
# Long conversations have several MiB; aiohttp's own limit is one.
_MAX_REQUEST_BYTES = 64 << 20


class _OpenAIBody(ChatBody):
    model: str = ""  # the proxy has one model


def _openai_whole(model: str, answer: Answer) -> Json:
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    return {
        **_openai_envelope("chat.completion", model),
        "choices": [{**choice, "logprobs": None}],
        "usage": _openai_usage(answer),
    }


def _openai_events(model: str, answer: Answer, body: ChatBody) -> Iterator[bytes]:
    """Yields the server-sent events of a stream: the role, the message, the end, the usage."""
    envelope = _openai_envelope("chat.completion.chunk", model)
    message = {**answer.message, "content": answer.message["content"] or ""}
    role = {"role": message.pop("role"), "content": ""}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    usage = body.stream_options is not None and body.stream_options.include_usage
    ends = ((role, None), (message, None), ({}, answer.finish_reason))
    for delta, finish_reason in ends:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        chunk = {**envelope, "choices": [choice], **({"usage": None} if usage else {})}
        yield f"data: {json.dumps(chunk)}\n\n".encode()
    if usage:
        chunk = {**envelope, "choices": [], "usage": _openai_usage(answer)}
        yield f"data: {json.dumps(chunk)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _openai_envelope(kind: str, model: str) -> Json:
    completion_id = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model}


def _openai_usage(answer: Answer) -> Json:
    prompt, sampled = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


@dataclass(frozen=True)
class _Api:
    """Requests and responses of an API."""

    parse: Callable[[bytes], ChatBody]
    whole: Callable[[str, Answer], Json]
    events: Callable[[str, Answer, ChatBody], Iterator[bytes]]
    error_body: Callable[[ApiError], Json]


_ROUTES = {
    "/v1/messages": _Api(
        messages_api.parse, messages_api.whole, messages_api.events, messages_api.error_body
    ),
    "/v1/chat/completions": _Api(_OpenAIBody.parse, _openai_whole, _openai_events, ApiError.body),
}


def _handler(api: _Api) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        deps = request.app[_DEPS]
        try:
            address = parse_address(request.match_info.get("address", ""))
            body, answer = await answer_request(deps, api.parse, await request.read(), address)
        except web.HTTPException:  # aiohttp's own, such as a body that is too large
            raise
        except Exception as error:
            return _refuse(request, api, error)
        if body.stream:
            return await _serve_sse(request, api.events(deps.model_label, answer, body))
        return web.json_response(api.whole(deps.model_label, answer))

    return handle


def _refuse(request: web.Request, api: _Api, error: Exception) -> web.Response:
    problem = as_api_error(error)
    if problem.status >= 500:
        logger.error("%s failed", request.path, exc_info=error)
    else:
        # Only the field: the message, which the client gets, may quote the conversation.
        logger.warning("rejected request: path=%s field=%s", request.path, problem.param)
    return web.json_response(api.error_body(problem), status=problem.status)


async def _serve_sse(request: web.Request, chunks: Iterable[bytes]) -> web.StreamResponse:
    """Sends server-sent events; a client that disconnects ends them without an error."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    try:
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
    except ConnectionResetError:
        logger.debug("%s: the client has disconnected", request.path)
    return response


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "model": request.app[_DEPS].model_label})


def _require(auth_token: str) -> Any:
    expected = auth_token.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = request.headers.get("x-api-key") or bearer
        # Compared as bytes, because a string with other letters than ASCII would raise.
        matches = hmac.compare_digest(given.encode(errors="replace"), expected)
        if matches or request.path == "/healthz":
            return await handler(request)
        # Both APIs' clients read this form.
        problem = ApiError("the proxy's token is missing or wrong: send it as key", status=401)
        return web.json_response(messages_api.error_body(problem), status=401)

    return check


def make_app(deps: ProxyDeps, *, auth_token: str | None = None) -> web.Application:
    """Returns the proxy as an aiohttp application.

    Each API is at its usual path, and at ``/r/KEY/VALUE/…`` before it, the address of what the
    request's sample belongs to. With ``auth_token``, requests other than ``/healthz`` must have
    it as ``x-api-key`` or as bearer token; an empty one means none.
    """
    middlewares = [_require(auth_token)] if auth_token else []
    app = web.Application(middlewares=middlewares, client_max_size=_MAX_REQUEST_BYTES)
    app[_DEPS] = deps
    app.router.add_get("/healthz", _healthz)
    for path, api in _ROUTES.items():
        handler = _handler(api)
        app.router.add_post(path, handler)
        app.router.add_post("/r/{address:.+}" + path, handler)
    return app
