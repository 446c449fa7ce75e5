"""Anthropic's Messages API: a request as one of the Chat Completions API, and the answer back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from tinker_cookbook.capture.proxy.complete import Answer
from tinker_cookbook.server.bodies import Int64, Json
from tinker_cookbook.server.openai.protocol import ApiError, ChatBody, first_problem
from tinker_cookbook.server.openai.responses import part_text

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
# Choices of tools in OpenAI's format. The proxy refuses "required".
_CHOICES = {"any": "required", "tool": "required"}


class MessagesBody(BaseModel):
    """Body of ``POST /v1/messages``. Other fields are ignored: agents send new ones often, and
    most have no effect on the text."""

    model: str = ""
    messages: list[Json] = Field(min_length=1)
    max_tokens: Int64 | None = Field(None, ge=1)
    system: str | list[Json] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    """Whether the model thinks is up to the renderer."""
    stream: bool | None = None
    mcp_servers: list[Json] | None = None


def parse(raw: bytes) -> ChatBody:
    """Returns the request as one of the Chat Completions API; raises ``ApiError``."""
    try:
        body = MessagesBody.model_validate_json(raw)
    except ValidationError as error:
        raise first_problem(error) from error
    if body.mcp_servers:
        raise ApiError("mcp_servers: this proxy calls no servers", param="mcp_servers")
    # A renderer expects one system message at the start. Agents also send some between the turns.
    system, messages = [part_text(body.system or "", "system")], []
    for i, message in enumerate(body.messages):
        if message.get("role") == "system":
            system.append(part_text(message.get("content"), f"messages[{i}].content"))
        else:
            messages += _turn(message, f"messages[{i}]")
    if text := "\n\n".join(filter(None, system)):
        messages.insert(0, {"role": "system", "content": text})
    choice = body.tool_choice or {}
    kind = choice.get("type")
    fields = body.model_dump(include={"model", "max_tokens", "temperature", "top_p", "top_k"})
    fields |= {
        "messages": messages,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        "tool_choice": _CHOICES.get(str(kind), kind),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
    }
    return ChatBody.parse(json.dumps(fields).encode())


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type", "custom") != "custom":
        raise ApiError(
            f"{where}: got a tool of type {tool['type']!r}, whose parameters only Anthropic's "
            "models know; give a tool with input_schema",
            param=where,
        )
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _turn(message: Json, where: str) -> list[Json]:
    """Converts a message: results of tools become messages of their own, before its text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(
            f"{where}.role: got {json.dumps(role)[:80]}, expected user, assistant or system",
            param=f"{where}.role",
        )
    turn: Json = {"role": role, "content": ""}
    results: list[Json] = []
    for j, block in enumerate(content if isinstance(content, list) else [content]):
        place = f"{where}.content[{j}]"
        block = block if isinstance(block, dict) else {"type": "text", "text": block}
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            call = {"name": block.get("name"), "arguments": arguments}
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": block.get("id"), "type": "function", "function": call})
        elif kind == "tool_result" and role == "user":
            text = part_text(block.get("content") or "", f"{place}.content")
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            )
        elif kind == "thinking" and role == "assistant":
            thinking = turn.get("reasoning_content", "") + str(block.get("thinking") or "")
            turn["reasoning_content"] = thinking
        elif kind != "redacted_thinking":
            turn["content"] += part_text(block, place)
    has_turn = isinstance(content, str) or any(turn.get(n) for n in ("content", "tool_calls"))
    return [*results, turn] if has_turn else results


def error_body(error: ApiError) -> Json:
    """Returns an error in Anthropic's format."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def whole(model: str, answer: Answer) -> Json:
    """Returns the body of a response that is not streamed."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
    content = _blocks(answer.message)
    return {**_envelope(model), "content": content, **_stop(answer), "usage": usage}


def events(model: str, answer: Answer, body: ChatBody) -> Iterator[bytes]:
    """Yields the server-sent events of a stream, one delta for each block."""

    def event(kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()

    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    start = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message={**_envelope(model), **start})
    for i, block in enumerate(_blocks(answer.message)):
        if block["type"] == "text":
            empty: Json = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=i, content_block=empty)
        yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    tokens = {"output_tokens": answer.completion_tokens}
    yield event("message_delta", delta=_stop(answer), usage=tokens)
    yield event("message_stop")


def _envelope(model: str) -> Json:
    message_id = f"msg_{secrets.token_hex(12)}"
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def _stop(answer: Answer) -> Json:
    reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(answer.finish_reason)
    reason = reason or ("stop_sequence" if answer.stop_sequence else "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


def _blocks(message: Json) -> list[Json]:
    calls = message.get("tool_calls", [])
    text = message["content"] or ""
    blocks: list[Json] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        written = call["function"]["arguments"]
        try:
            arguments = json.loads(written)
        except ValueError:
            arguments = None
        # The API has only objects here; other arguments are returned as the model wrote them.
        arguments = arguments if isinstance(arguments, dict) else {"_raw_arguments": written}
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks
