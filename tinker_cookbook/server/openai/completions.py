"""``POST /completions``: continuations of prompts; ``POST /chat/completions``: the next message."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from tinker import types

from tinker_cookbook.backends.convert import TokenSequence, sequence_of
from tinker_cookbook.engine.sampling.requests import PromptScores
from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    StreamingTextDelta,
    StreamingThinkingDelta,
)
from tinker_cookbook.renderers.core.codec import token_bytes, token_name
from tinker_cookbook.renderers.core.messages import (
    ensure_text,
    get_text_content,
    normalize_messages,
)
from tinker_cookbook.renderers.core.parsing import ContentDelta, MessageReader
from tinker_cookbook.server.access import ApiUserDep
from tinker_cookbook.server.bodies import Json, json_body_schema, read_json
from tinker_cookbook.server.keys import ApiUser
from tinker_cookbook.server.openai.images import IMAGE_PARTS, image_url, prepare
from tinker_cookbook.server.openai.models import LoaderDep, ModelLoader, renderer_of
from tinker_cookbook.server.openai.protocol import (
    ApiError,
    CallPolicy,
    ChatBody,
    CompletionBody,
    Tool,
    format_options,
    tool_spec,
)
from tinker_cookbook.server.openai.sampling import (
    ApiCall,
    Choice,
    SamplingOptions,
    json_safe_logprob,
)
from tinker_cookbook.server.openai.text import IncrementalDetokenizer, SampledToken

router = APIRouter()


@router.post("/completions", openapi_extra=json_body_schema(CompletionBody))
async def completions(request: Request, owner: ApiUserDep, loader: LoaderDep) -> Response:
    """Returns continuations of one or several prompts."""
    body = await read_json(request, CompletionBody.parse)
    call = await loader.run(_prepare_completions, loader, owner, body)
    return await call.respond(request)


def _prepare_completions(loader: ModelLoader, owner: ApiUser, body: CompletionBody) -> ApiCall:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's default
    if max_tokens == 0 and not body.echo:
        raise ApiError("max_tokens: got 0, expected at least 1 without echo", param="max_tokens")
    if not body.prompt and not isinstance(body.prompt, str):
        raise ApiError("prompt: got an empty list, expected a prompt", param="prompt")
    # A string or token ids is one prompt; otherwise a list of prompts.
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: Any = [body.prompt] if single else body.prompt
    model, num_samples, best_of = loader.load(owner, body.model), body.n or 1, body.best_of
    # With as many samples as choices there is nothing to leave out, so their order stays.
    best_of = None if best_of == num_samples else best_of
    if best_of is not None and (best_of < num_samples or body.stream):
        problem = f"best_of: got {best_of}, expected at least n ({num_samples}), without stream"
        raise ApiError(problem, param="best_of")
    # Before the work for each prompt and choice, which would delay other requests.
    loader.state.check_samples((best_of or num_samples) * len(prompts))
    options = SamplingOptions.of(body, model, max(1, max_tokens), body.logprobs)
    options = replace(options, best_of=best_of)
    echo = bool(body.echo)
    choices: list[CompletionChoice] = []
    inputs = []
    for prompt in prompts:
        text, ids = "", prompt
        if isinstance(prompt, str):  # the tokenizer adds its BOS token
            text, ids = prompt, model.codec.tokenizer.encode(prompt)
        inputs.append(TokenSequence(np.asarray(ids, dtype=np.int64)))
        for _ in range(num_samples):
            choices.append(CompletionChoice(len(choices), options, ids, text, echo))
    # The response has log-probabilities of the prompt only if it has the prompt.
    score = echo and options.top_logprobs is not None
    return ApiCall(
        *(loader.state, owner.name, body, options, inputs, choices),
        score_prompts=score,
        discard_tokens=max_tokens == 0,
    )


class CompletionChoice(Choice):
    """Choice of a completion: the text, after its prompt with ``echo``."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, index: int, options: SamplingOptions, prompt: list[int], text: str, echo: bool
    ) -> None:
        """``text`` is the text of the prompt; empty if the request has only token ids."""
        super().__init__(index, options)
        self._prompt, self._prompt_text, self._echo = prompt, text, echo
        self._prompt_chars = 0
        self._text = ""
        self._has_tokens = False

    def begin(self, scores: PromptScores | None) -> list[Json]:
        """Returns a chunk with the prompt if it is echoed."""
        if not self._echo:
            return []
        prompt, text = self._prompt, self._prompt_text
        tokens = [SampledToken(token, None) for token in prompt]
        if scores is not None and scores.logprobs is not None:
            ids, values = scores.topk_ids, scores.topk_logprobs
            # The first token has no context, so it has no log-probability.
            for i in range(1, len(tokens)):
                top = None if ids is None or values is None else (ids[i], values[i])
                tokens[i] = SampledToken(prompt[i], float(scores.logprobs[i]), top)
        detokenizer = IncrementalDetokenizer(self._options.model.codec, (), ())
        decoded = detokenizer.add(tokens) + detokenizer.finish()
        # A BOS token and a leading space of the vocabulary are not part of the text.
        self._text = text or decoded
        extra = len(decoded) - len(self._text)
        for token in detokenizer.take_tokens():
            self._tokens.append(replace(token, offset=max(0, token.offset - extra)))
        self._prompt_chars = len(self._text)
        return [self.whole()]

    def add(self, tokens: Sequence[SampledToken]) -> Json | None:
        """Returns a chunk with the text that can no longer change, or None."""
        self._has_tokens = True
        text = self._detokenizer.add(tokens)
        return self._chunk(text) if text else None

    def end(self, stop_reason: str) -> list[Json]:
        """Returns a chunk with the rest of the text and the finish reason."""
        text = self._detokenizer.finish()
        # If no tokens were requested, drop the engine's single token and its stop reason.
        stopped = self._has_tokens and (self._detokenizer.stopped or stop_reason == "stop")
        self._finish_reason = "stop" if stopped else "length"
        return [self._chunk(text)]

    def _chunk(self, text: str) -> Json:
        tokens = self._detokenizer.take_tokens()
        if self._prompt_chars:
            tokens = [replace(one, offset=one.offset + self._prompt_chars) for one in tokens]
        self._text += text
        self._tokens += tokens
        return self._text_json(text, tokens)

    def whole(self) -> Json:
        """Returns the whole choice."""
        # The prompt's tokens have a separate field, with and without echo.
        skip = len(self._prompt) if self._echo else 0
        body = self._text_json(self._text, self._tokens, skip)
        return body | ({"prompt_token_ids": self._prompt} if self._options.token_ids else {})

    def _text_json(self, text: str, tokens: Sequence[SampledToken], skip: int = 0) -> Json:
        logprobs = None
        if self._options.top_logprobs is not None:
            codec = self._options.model.codec
            logprobs = {
                "tokens": [self._name(t.token) or token_name(codec, t.token) for t in tokens],
                "token_logprobs": [
                    None if t.logprob is None else json_safe_logprob(t.logprob) for t in tokens
                ],
                "top_logprobs": [self._top_logprobs(t) for t in tokens],
                "text_offset": [t.offset for t in tokens],
            }
        return self._json({"text": text}, logprobs, tokens[skip:])

    def _top_logprobs(self, token: SampledToken) -> dict[str, float] | None:
        """Returns the most probable tokens, and the sampled one if it is not among them."""
        if token.top is None or token.logprob is None:
            return None
        top: dict[str, float] = {}
        pairs = zip(token.top[0].tolist(), token.top[1].tolist(), strict=True)
        for other, logprob in (*pairs, (token.token, token.logprob)):
            name = self._name(other) or token_name(self._options.model.codec, other)
            top.setdefault(name, json_safe_logprob(logprob))
        return top


_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")


@router.post("/chat/completions", openapi_extra=json_body_schema(ChatBody))
async def chat_completions(request: Request, owner: ApiUserDep, loader: LoaderDep) -> Response:
    """Returns the next message of a conversation."""
    body = await read_json(request, ChatBody.parse)
    call = await prepare(request, loader, owner, body, "messages", prepare_chat)
    return await call.respond(request)


def prepare_chat(loader: ModelLoader, owner: ApiUser, body: ChatBody) -> ApiCall:
    """Returns the call for the next message; blocks, so it needs a thread."""
    model = loader.load(owner, body.model)
    renderer = renderer_of(model, body.renderer_name, format_options(body))
    prompt = chat_prompt(renderer, body.messages, body.tools or [])
    calls = CallPolicy.of(body)
    mask = None
    if body.constrains_text or calls.constrains:
        setting = "response_format" if body.constrains_text else "tool_choice"
        constraints = load_leaf("server.openai.constraints", setting)
        mask = constraints.chat_mask(body, calls, renderer, model.sampler.base.eos_ids)
    # Default: as many tokens as the context has space for.
    # OpenAI renamed max_tokens; the newer name takes precedence.
    newer = body.max_completion_tokens
    max_tokens = body.max_tokens if newer is None else newer
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs: needs logprobs=true", param="top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    stop = renderer.get_stop_sequences()
    options = SamplingOptions.of(body, model, max_tokens, top, stop, mask)
    tokens = sequence_of(
        prompt, "prompt", partial(loader.state.engine.image_reader, model.base_model)
    )
    if tokens.images and options.token_ids:
        problem = "return_token_ids: got images, which have no token ids; leave one of them out"
        raise ApiError(problem, param="return_token_ids")
    # Not a ``response_parser``, which parses tokens: a stop string may end within a token.
    choices = [
        ChatChoice(i, options, renderer.message_reader(), calls) for i in range(options.num_samples)
    ]
    first = {"prompt_token_ids": tokens.tokens.tolist()} if options.token_ids else {}
    call = (loader.state, owner.name, body, options, [tokens], choices)
    return ApiCall(*call, first_fields=first)


def chat_prompt(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> types.ModelInput:
    """Returns the generation prompt of a conversation in OpenAI's format."""
    if not messages:
        raise ApiError("messages: got none, expected at least one", param="messages")
    converted = [_convert(message, f"messages[{i}]") for i, message in enumerate(messages)]
    normal = normalize_messages(converted)
    # Some chat formats write the function's name in a tool result; OpenAI's messages have only
    # the id of the call.
    names = {
        call.id: call.function.name for message in normal for call in message.get("tool_calls", [])
    }
    for message in normal:
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id"))):
            message.setdefault("name", name)
    if tools:
        system = ""
        if normal[0]["role"] == "system":
            system, normal = ensure_text(normal[0]["content"]), normal[1:]
        specs = [tool_spec(tool) for tool in tools]
        prefix = renderer.create_conversation_prefix_with_tools(specs, system)
        normal = [*prefix, *normal]
    return renderer.build_generation_prompt(normal)


def _convert(message: Mapping[str, Any], where: str) -> Json:
    # Fields with an effect must not be ignored; clients send unused ones empty.
    for field, value in message.items():
        if field not in _MESSAGE_FIELDS and value not in (None, [], {}):
            raise ApiError(f"{where}.{field}: this server does not support it", param=where)
    converted = {
        field: message[field] for field in _MESSAGE_FIELDS if message.get(field) is not None
    }
    for field, kind in (("tool_call_id", str), ("tool_calls", list)):
        if not isinstance(converted.get(field, kind()), kind):
            got, expected = converted[field], "a string" if kind is str else "a list"
            problem = f"{where}.{field}: got {json.dumps(got)[:80]}, expected {expected}"
            raise ApiError(problem, param=f"{where}.{field}")
    if converted.get("role") == "developer":
        converted["role"] = "system"  # the newer name of the role
    # Some chat formats would write any word as a header of the prompt.
    if (role := converted.get("role")) not in _ROLES:
        raise ApiError(
            f"{where}.role: got {json.dumps(role)[:80]}, expected one of {', '.join(_ROLES)} or "
            "developer",
            param=f"{where}.role",
        )
    content = converted.setdefault("content", None)
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        only_text = all(part["type"] == "text" for part in parts)
        converted["content"] = "".join(part["text"] for part in parts) if only_text else parts
    return converted


def _part(part: Any, where: str) -> Json:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in IMAGE_PARTS:
        url = image_url(part, where)
        # Other addresses were replaced before; a renderer would read any file of this machine.
        if not url.startswith("data:"):
            problem = f"{where}.image_url: got no data URL, expected data:image/png;base64,…"
            raise ApiError(problem, param=where)
        return {"type": "image", "image": url}
    raise ApiError(f"{where}: got a part of type {kind!r}, expected text or image_url", param=where)


def answer_of(message: Message, policy: CallPolicy) -> tuple[Json, str]:
    """Returns a parsed message in OpenAI's format, and the last part of its text: the calls that
    cannot be parsed or are not allowed."""
    unparsed = "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))
    found, refused = policy.split(message.get("tool_calls", []))
    calls = [
        {
            "id": call.id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": call.function.model_dump(),
        }
        for call in found
    ]
    more_text = unparsed + refused
    text = get_text_content(message) + more_text
    # As in OpenAI's API, a message with only calls has null as content.
    answer: Json = {"role": "assistant", "content": text if text or not calls else None}
    if not isinstance(content := message["content"], str):
        thinking = (part["thinking"] for part in content if part["type"] == "thinking")
        answer["reasoning_content"] = "".join(thinking)
    return (answer | {"tool_calls": calls} if calls else answer), more_text


class ChatChoice(Choice):
    """Choice of a chat completion: text, thinking and tool calls."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, index: int, options: SamplingOptions, reader: MessageReader, calls: CallPolicy
    ) -> None:
        super().__init__(index, options)
        self._reader, self._calls = reader, calls
        self._message: Json = {}

    def begin(self, scores: PromptScores | None) -> list[Json]:
        """Returns a chunk with the role."""
        return [self._chunk({"role": "assistant", "content": ""}, [])]

    def add(self, tokens: Sequence[SampledToken]) -> Json | None:
        """Returns a chunk with new text and thinking, or None. Tool calls follow at the end."""
        # The detokenizer cuts stop strings first, so the reader never sees them.
        text = self._detokenizer.add(tokens)
        delta = _delta(self._reader.feed(text)) if text else {}
        ready = self._take_tokens()
        options = self._options
        listed = ready and (options.top_logprobs is not None or options.token_ids)
        return self._chunk(delta, ready) if delta or listed else None

    def end(self, stop_reason: str) -> list[Json]:
        """Returns a chunk with the rest and the tool calls, and one with the finish reason."""
        text = self._detokenizer.finish()
        deltas = [*(self._reader.feed(text) if text else []), *self._reader.finish()]
        message, delta = self._reader.message(), _delta(deltas)
        answer, more_text = answer_of(message, self._calls)
        if more_text:
            delta["content"] = delta.get("content", "") + more_text
        self._message = {**answer, "refusal": None}
        calls = answer.get("tool_calls", [])
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        ready = self._take_tokens()
        chunks = [self._chunk(delta, ready)] if delta or ready else []
        # A response truncated at max_tokens reports ``length`` even if it contains a call.
        stopped = self._detokenizer.stopped or stop_reason == "stop"
        self._finish_reason = ("tool_calls" if calls else "stop") if stopped else "length"
        return [*chunks, self._chunk({}, [])]

    def whole(self) -> Json:
        """Returns the whole choice."""
        return self._json({"message": self._message}, self._logprobs(self._tokens), self._tokens)

    def _take_tokens(self) -> list[SampledToken]:
        tokens = self._detokenizer.take_tokens()
        self._tokens += tokens
        return tokens

    def _chunk(self, delta: Json, tokens: Sequence[SampledToken]) -> Json:
        return self._json({"delta": delta}, self._logprobs(tokens) if tokens else None, tokens)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if self._options.top_logprobs is None:
            return None
        codec = self._options.model.codec

        def entry(token: int, logprob: float) -> Json:
            name, letters = self._name(token) or codec.decode([token]), token_bytes(codec, token)
            return {"token": name, "logprob": json_safe_logprob(logprob), "bytes": letters}

        content = []
        for token in tokens:
            assert token.logprob is not None
            ids, logprobs = token.top or (np.empty(0, int), np.empty(0))
            top = [entry(*pair) for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)]
            content.append({**entry(token.token, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _delta(deltas: Iterable[ContentDelta]) -> Json:
    fields: Json = {}
    for delta in deltas:
        if isinstance(delta, StreamingTextDelta):
            fields["content"] = fields.get("content", "") + delta.text
        elif isinstance(delta, StreamingThinkingDelta):
            fields["reasoning_content"] = fields.get("reasoning_content", "") + delta.thinking
    return fields
