"""Models of a chat. They answer a conversation, token by token if the backend streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tinker_cookbook.backends.connect import Connection
from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.renderers import Message, StreamingTextDelta, StreamingThinkingDelta
from tinker_cookbook.renderers.core.codec import token_bytes
from tinker_cookbook.renderers.core.messages import (
    TextPart,
    ThinkingPart,
    ToolCall,
)
from tinker_cookbook.renderers.core.parsing import ContentDelta
from tinker_cookbook.sampling_model import SamplingModel
from tinker_cookbook.third_party.openai_compat import tinker_messages_to_openai
from tinker_cookbook.utils.imports import tinker

_OPENAI_PREFIX = "/oai/api/v1"  # OpenAI API of tinker_cookbook.server
_PROBE_SECONDS = 5.0

Show: TypeAlias = Callable[[ContentDelta], None]
_Tokens: TypeAlias = "Sequence[tuple[int, float]]"
"""Token ids with their log-probabilities."""


@dataclass(frozen=True)
class SamplingChoices:
    """Sampling parameters of an answer."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None = None


@dataclass(frozen=True)
class AnswerToken:
    """Token of an answer: its UTF-8 bytes (possibly part of a character) and its
    log-probability in nats at temperature 1."""

    raw: bytes
    logprob: float


@dataclass(frozen=True)
class Answer:
    """Answer of a model, and its stop reason."""

    message: Message
    ending: Literal["stop", "length", "interrupted"]
    tokens: list[AnswerToken]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sampled before an interruption."""
        return self.ending == "interrupted" and not self.message["content"]


@dataclass
class ChatModel:
    """Model that answers through the SDK's sampling client.

    The bundled engine reports tokens as they are sampled; other clients return only complete
    answers.
    """

    model: SamplingModel
    label: str
    context_length: int | None
    """Maximum tokens of prompt and answer together, if the backend reports it."""
    streams: bool = False

    def prompt(self, messages: Sequence[Message]) -> tinker.ModelInput:
        """Returns the prompt for the next answer."""
        return self.model.renderer.build_generation_prompt(messages)

    async def answer(
        self, messages: Sequence[Message], choices: SamplingChoices, show: Show
    ) -> Answer:
        """Samples one answer and calls ``show`` with its pieces as they become final.

        Cancelling the task ends the sampling and returns the answer so far, as ``interrupted``.
        """
        renderer = self.model.renderer
        parser = renderer.response_parser()
        tokens: list[tuple[int, float]] = []

        def take(new: _Tokens) -> None:
            tokens.extend(new)
            for delta in parser.feed([token for token, _ in new]):
                show(delta)

        params = tinker.SamplingParams(
            max_tokens=choices.max_tokens,
            temperature=choices.temperature,
            top_p=choices.top_p,
            seed=choices.seed,
            stop=renderer.get_stop_sequences(),
        )
        ending: Literal["stop", "length", "interrupted"] = "stop"
        sample = self._stream if self.streams else self._sample_whole
        try:
            await sample(self.prompt(messages), params, take)
        except asyncio.CancelledError:
            ending = "interrupted"
        for delta in parser.finish():
            show(delta)
        if ending == "stop" and len(tokens) >= choices.max_tokens and not parser.termination:
            ending = "length"
        # A custom Renderer may parse a message that differs from the streamed pieces.
        message, _ = renderer.parse_response([token for token, _ in tokens])
        codec = renderer.codec
        named = [AnswerToken(bytes(token_bytes(codec, t)), logprob) for t, logprob in tokens]
        return Answer(message, ending, named)

    async def _stream(
        self, prompt: tinker.ModelInput, params: tinker.SamplingParams, take: Callable[..., None]
    ) -> None:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, float] | None]()

        # Called on the engine's thread.
        def put(item: tuple[int, float] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def put_token(_: int, sample: Any) -> None:
            put((sample.tokens[-1], sample.logprobs[-1]))

        client: Any = self.model.client  # only the local client has on_token
        future = client.sample(prompt, 1, params, on_token=put_token).future()
        future.add_done_callback(lambda _: put(None))
        try:
            while (item := await queue.get()) is not None:
                take([item])
            future.result()  # raises the request's error
        finally:
            future.cancel()  # no effect if it has ended

    async def _sample_whole(
        self, prompt: tinker.ModelInput, params: tinker.SamplingParams, take: Callable[..., None]
    ) -> None:
        response = await self.model.client.sample(
            prompt=prompt, num_samples=1, sampling_params=params
        )
        (sequence,) = response.sequences
        logprobs = sequence.logprobs or [float("nan")] * len(sequence.tokens)
        take(list(zip(sequence.tokens, logprobs, strict=True)))


@dataclass
class StreamedChatModel(ChatModel):
    """Model of a ``tinker_cookbook.server``, streamed through its OpenAI API."""

    url: str = ""
    """URL of the OpenAI API."""
    key: str = field(default="", repr=False)

    async def answer(
        self, messages: Sequence[Message], choices: SamplingChoices, show: Show
    ) -> Answer:
        """Samples one answer like :meth:`ChatModel.answer`."""
        body = {
            "model": self.model.name,
            "messages": tinker_messages_to_openai(messages)["messages"],
            "renderer_name": self.model.renderer_name,
            "max_tokens": choices.max_tokens,
            "temperature": choices.temperature,
            "top_p": choices.top_p,
            "seed": choices.seed,
            "logprobs": True,
            "stream": True,
        }
        received = _Received(show)
        ending: Literal["stop", "length", "interrupted"] = "interrupted"
        with contextlib.suppress(asyncio.CancelledError):
            await self._receive(body, received)
            ending = "length" if received.finish_reason == "length" else "stop"
        return Answer(received.message(), ending, received.tokens)

    async def _receive(self, body: dict[str, Any], received: _Received) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {self.key}"}
        # No time limit: an answer may wait for other requests, and Ctrl-C ends it.
        try:
            async with (
                httpx.AsyncClient(timeout=None) as http,
                http.stream(
                    "POST", f"{self.url}/chat/completions", json=body, headers=headers
                ) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise BackendError(_message_of(response.text, response.status_code))
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        received.add(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise BackendError(f"{self.url}: the answer ended early ({error!r})") from error
        if received.finish_reason is None:
            raise BackendError(f"{self.url}: the answer ended without a finish reason")


class _Received:
    """Assembles the chunks of an OpenAI API stream."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._text, self._thinking, self._calls = "", "", list[ToolCall]()
        self.tokens: list[AnswerToken] = []
        self.finish_reason: str | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        """Adds one chunk; raises ``BackendError`` for a server error."""
        if "error" in chunk:
            raise BackendError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thinking := delta.get("reasoning_content"):
                self._thinking += thinking
                self._show(StreamingThinkingDelta(thinking))
            if text := delta.get("content"):
                self._text += text
                self._show(StreamingTextDelta(text, content_index=1 if self._thinking else 0))
            for call in delta.get("tool_calls") or ():
                fields = {name: call[name] for name in ("id", "function")}
                self._calls.append(ToolCall.model_validate(fields))
            for token in (choice.get("logprobs") or {}).get("content") or ():
                self.tokens.append(AnswerToken(bytes(token["bytes"]), token["logprob"]))
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def message(self) -> Message:
        """Returns the message; its content is a string if there is no thinking."""
        message = Message(role="assistant", content=self._text)
        if self._thinking:
            thinking = ThinkingPart(type="thinking", thinking=self._thinking)
            text = [TextPart(type="text", text=self._text)] if self._text else []
            message["content"] = [thinking, *text]
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _message_of(body: str, status: int) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {body[:200]}"


async def chat_models(connection: Connection, models: Sequence[SamplingModel]) -> list[ChatModel]:
    """Returns the models with their labels, streamed where the backend supports it.

    Raises ``ConfigurationError`` if a model is given twice.
    """
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"model_path: got {name} twice, expected different models")
    labels = short_names([model.given or model.name for model in models])
    contexts = await _context_lengths(connection)
    streamed: dict[str, Any] | None = None
    if connection.kind == "tinker":
        streamed = await _openai_api(connection)
    chats: list[ChatModel] = []
    for model, label in zip(models, labels, strict=True):
        context = contexts.get(model.model_name)
        if streamed is not None:
            chats.append(StreamedChatModel(model, label, context, **streamed))
        else:
            chats.append(ChatModel(model, label, context, streams=connection.kind == "local"))
    return chats


def short_names(names: Sequence[str]) -> list[str]:
    """Returns a short label for each model: the last part of its name, or more parts
    if that is not unique."""
    parts = [name.removeprefix("tinker://").split("/") for name in names]
    # Skip the kind of weights, which is the same in most names.
    parts = [[word for word in words if word not in ("sampler_weights", "")] for words in parts]
    return [
        next(
            label
            for count in range(1, len(words) + 1)
            if [w[-count:] for w in parts].count(words[-count:]) == 1 or count == len(words)
            for label in ["/".join(words[-count:])]
        )
        for words in parts
    ]


async def _context_lengths(connection: Connection) -> dict[str, int]:
    service: Any = connection.service
    with warnings.catch_warnings():
        # Not all versions of the SDK have the newer name.
        warnings.simplefilter("ignore", FutureWarning)
        capabilities = await service.get_server_capabilities_async()
    return {
        str(model.model_name): model.max_context_length
        for model in capabilities.supported_models
        if model.max_context_length
    }


async def _openai_api(connection: Connection) -> dict[str, Any] | None:
    """Returns URL and key of the OpenAI API if the server is a ``tinker_cookbook.server``."""
    import httpx
    from tinker.lib.base_url import resolve_base_url

    key = os.environ.get("TINKER_API_KEY")
    if not key:  # a stored login exists only for the hosted service
        return None
    _, url, *_ = connection.target
    address = resolve_base_url(url).rstrip("/") + _OPENAI_PREFIX
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        async with httpx.AsyncClient(timeout=_PROBE_SECONDS) as http:
            response = await http.get(
                f"{address}/models", headers={"Authorization": f"Bearer {key}"}
            )
        if any(entry["owned_by"] == "tinker_cookbook" for entry in response.json()["data"]):
            return {"url": address, "key": key}
    return None
