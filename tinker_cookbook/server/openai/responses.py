"""``POST /responses``: the next message in OpenAI's newer API, for text and function tools.

A request is converted to a chat request, and its answer to output items: reasoning, a message,
calls. Responses are not stored.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from tinker_cookbook.server.access import ApiUserDep
from tinker_cookbook.server.bodies import Json, json_body_schema, read_json
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.openai.completions import prepare_chat
from tinker_cookbook.server.openai.images import IMAGE_PARTS, image_url, prepare
from tinker_cookbook.server.openai.models import LoaderDep, ModelLoader
from tinker_cookbook.server.openai.protocol import (
    ApiError,
    ChatBody,
    ResponsesBody,
    SamplingBody,
    as_api_error,
)
from tinker_cookbook.server.openai.sampling import ApiCall

logger = logging.getLogger(__name__)

router = APIRouter()

_LOGPROBS = "message.output_text.logprobs"
# Ignored fields: responses are not stored, and reasoning is not encrypted.
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


@router.post("/responses", openapi_extra=json_body_schema(ResponsesBody))
async def responses(request: Request, owner: ApiUserDep, loader: LoaderDep) -> Response:
    """Returns the next message of a conversation as output items."""
    body = await read_json(request, ResponsesBody.parse)
    call = await prepare(request, loader, owner, body, "input", _prepare)
    return await call.respond(request)


def _prepare(loader: ModelLoader, owner: ApiUser, body: ResponsesBody) -> ApiCall:
    chat = prepare_chat(loader, owner, as_chat_body(body))
    return _ResponsesCall(loader.state, owner.name, body, chat.options, chat.prompts, chat.choices)


def as_chat_body(body: ResponsesBody) -> ChatBody:
    """Converts to a chat request; raises ``ApiError`` for fields that chat cannot express."""
    if body.n not in (None, 1):
        raise ApiError(f"n: got {body.n}, expected 1: a response has one answer", param="n")
    for name in body.include or []:
        if name not in _INCLUDABLE:
            raise ApiError(
                f"include: got {name!r}, expected {' or '.join(_INCLUDABLE)}", param="include"
            )
    common = set(SamplingBody.model_fields) - {"stream_options", "n"}
    fields: Json = body.model_dump(include=common, exclude_none=True, by_alias=True)
    logprobs = _LOGPROBS in (body.include or [])
    fields |= {
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "chat_template_kwargs": body.chat_template_kwargs,
        "renderer_name": body.renderer_name,
        "logprobs": logprobs or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
    }
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    fields["tool_choice"] = choice
    form = (body.text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    fields["response_format"] = form or fields.get("response_format")
    return ChatBody.parse(json.dumps(fields).encode())


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        raise ApiError(
            f"{where}: got a tool of type {tool.get('type')!r}, expected function", param=where
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}


def _messages(body: ResponsesBody) -> list[Json]:
    """Converts the input to chat messages."""
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]

    def answer() -> Json:
        # Reasoning, text and calls of one answer are separate items in this API.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for i, item in enumerate(body.input):
        where, kind = f"input[{i}]", item.get("type", "message")
        if not isinstance(call_id := item.get("call_id") or "", str):
            problem = f"{where}.call_id: got {json.dumps(call_id)[:80]}, expected a string"
            raise ApiError(problem, param=f"{where}.call_id")
        if kind == "message" and item.get("role") == "assistant":
            # A new text starts a new answer, unless the last answer has only reasoning.
            if messages and messages[-1].get("content"):
                messages.append({"role": "assistant", "content": ""})
            answer()["content"] += part_text(item.get("content"), f"{where}.content")
        elif kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "reasoning":
            text = part_text(item.get("content") or item.get("summary") or [], f"{where}.content")
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            messages.append(result)
        else:
            raise ApiError(
                f"{where}: got an item of type {kind!r}, expected message, reasoning, "
                "function_call or function_call_output",
                param=where,
            )
    return messages


def _content(content: Any, where: str) -> str | list[Json]:
    """Returns the text, or the parts of a chat message if there is an image."""
    if not isinstance(content, list):
        return part_text(content, where)
    parts: list[Json] = []
    for j, part in enumerate(content):
        at = f"{where}[{j}]"
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
            parts.append({"type": "image_url", "image_url": {"url": image_url(part, at)}})
        else:
            parts.append({"type": "text", "text": _text(part, at)})
    return parts


def part_text(content: Any, where: str) -> str:
    """Returns the text of a string, a part, or a list of parts; raises ``ApiError`` for no text."""
    if isinstance(content, list):
        return "".join(_text(part, f"{where}[{j}]") for j, part in enumerate(content))
    return content if isinstance(content, str) else _text(content, where)


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise ApiError(
            f"{where}: got a part of type {kind!r}, expected text (images: input_image in messages "
            "of users and in results of calls)",
            param=where,
        )
    return part["text"]


class _ResponsesCall(ApiCall):
    """Call whose response has output items, complete or as events."""

    def __post_init__(self) -> None:
        super().__post_init__()
        body, settings = self.body, self.options.settings
        assert isinstance(body, ResponsesBody)
        created = self._envelope.pop("created")
        self._envelope |= {
            "id": f"resp-{secrets.token_hex(12)}",
            "object": "response",
            "created_at": created,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": False,
            "temperature": settings.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": settings.top_p,
            "max_output_tokens": body.max_output_tokens,
            "truncation": "disabled",
        }

    def _whole(self) -> Json:
        choice, stream = self.choices[0].whole(), _ItemStream()
        message = choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
        delta = {**message, "tool_calls": calls}
        list(stream.add({"delta": delta, "logprobs": choice["logprobs"]}))
        list(stream.finish())
        return self._response(stream.items)

    def _response(self, items: Sequence[Json]) -> Json:
        """Returns the response object of complete choices."""
        cut, usage = self.choices[0].whole()["finish_reason"] == "length", self._usage
        status = "incomplete" if cut else "completed"
        cached = usage["prompt_tokens_details"]
        return {
            **self._envelope,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [
                {**item, "status": status if item is items[-1] else "completed"} for item in items
            ],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def _events(self, chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
        """Yields server-sent events, from ``response.created`` to ``response.completed``."""
        stream = _ItemStream()
        try:
            started = {**self._envelope, "status": "in_progress", "output": [], "usage": None}
            yield stream.event("response.created", response=started)
            yield stream.event("response.in_progress", response=started)
            async for chunk in chunks:
                for event in stream.add(chunk):
                    yield event
            for event in stream.finish():
                yield event
            whole = self._response(stream.items)
            yield stream.event(f"response.{whole['status']}", response=whole)
        except Exception as error:
            # The status was already sent, so report the error in the stream.
            logger.exception("a stream ends with an error")
            problem = as_api_error(error).body()["error"]
            yield stream.event("error", error=problem, **problem)


@dataclass
class _ItemStream:
    """Builds output items from the chunks of a chat response, with the events of each change."""

    items: list[Json] = field(default_factory=list)
    _open: str | None = None
    _number: int = 0

    def event(self, kind: str, **fields: Any) -> str:
        """Returns a server-sent event."""
        # Put the fields first, so that an error's "type" does not replace the event's.
        body = {**fields, "type": kind, "sequence_number": self._number}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"

    def add(self, chunk: Json) -> Iterator[str]:
        """Adds a chunk; yields its events."""
        delta = chunk["delta"]
        if thinking := delta.get("reasoning_content"):
            yield from self._grow("reasoning", thinking, [])
        logprobs = (chunk.get("logprobs") or {}).get("content") or []
        if (text := delta.get("content")) or logprobs:
            yield from self._grow("message", text or "", logprobs)
        for call in delta.get("tool_calls") or []:
            yield from self._close()
            yield from self._add_call(call)

    def finish(self) -> Iterator[str]:
        """Closes the last item; a response without items gets an empty message."""
        if not self.items:
            yield from self._grow("message", "", [])
        yield from self._close()

    @property
    def _where(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _grow(self, kind: str, text: str, logprobs: list[Json]) -> Iterator[str]:
        """Appends text to the open item of this kind, or to a new one."""
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        if self._open != kind:
            yield from self._close()
            part: Json = {"type": name, "text": ""}
            item: Json = {"type": kind, "id": f"{kind[:3]}_{secrets.token_hex(12)}"}
            item |= {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            part |= {} if kind == "reasoning" else {"annotations": [], "logprobs": []}
            self.items.append({**item, "content": [part]})
            self._open = kind
            started = {**item, "content": [], "status": "in_progress"}
            at = len(self.items) - 1
            yield self.event("response.output_item.added", item=started, output_index=at)
            yield self.event(
                "response.content_part.added", part=dict(part), content_index=0, **self._where
            )
        part = self.items[-1]["content"][0]
        part["text"] += text
        more = {} if kind == "reasoning" else {"logprobs": logprobs}
        if logprobs:
            part["logprobs"] = [*part["logprobs"], *logprobs]
        yield self.event(
            f"response.{name}.delta", delta=text, content_index=0, **more, **self._where
        )

    def _close(self) -> Iterator[str]:
        """Ends the open item."""
        if self._open is None:
            return
        item, self._open = self.items[-1], None
        (part,) = item["content"]
        rest = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self.event(f"response.{part['type']}.done", content_index=0, **rest, **self._where)
        yield self.event("response.content_part.done", part=part, content_index=0, **self._where)
        yield self._done(item)

    def _add_call(self, call: Json) -> Iterator[str]:
        arguments = call["function"]["arguments"]
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments,
        }
        self.items.append(item)
        started = {**item, "arguments": "", "status": "in_progress"}
        at = len(self.items) - 1
        yield self.event("response.output_item.added", item=started, output_index=at)
        kind = "response.function_call_arguments"
        yield self.event(f"{kind}.delta", delta=arguments, **self._where)
        yield self.event(f"{kind}.done", arguments=arguments, name=item["name"], **self._where)
        yield self._done(item)

    def _done(self, item: Json) -> str:
        done = {**item, "status": "completed"}
        return self.event("response.output_item.done", item=done, output_index=len(self.items) - 1)
