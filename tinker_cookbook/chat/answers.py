"""Models of a chat. They answer a conversation, token by token if the backend streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinker_cookbook.backends.connect import Connection
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import BackendError, ConfigurationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.renderers.core.codec import token_bytes
from tinker_cookbook.renderers.core.parsing import ContentDelta
from tinker_cookbook.sampling_model import SamplingModel
from tinker_cookbook.utils.imports import tinker

_PROBE_SECONDS = 5.0

Show: TypeAlias = Callable[[ContentDelta], None]
_Take: TypeAlias = "Callable[[Sequence[tuple[int, float]]], None]"
"""Gets token ids with their log-probabilities."""


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
    """Answer of a model, its stop reason, and what was sampled after ``prompt``."""

    message: Message
    ending: Literal["stop", "length", "interrupted"]
    tokens: list[AnswerToken]
    prompt: tinker.ModelInput
    sampled: TokensWithLogprobs

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sampled before an interruption."""
        return self.ending == "interrupted" and not self.message["content"]


@dataclass
class ChatModel:
    """Model that answers through a sampling client, or streams from a server of this package."""

    model: SamplingModel
    label: str
    context_length: int | None
    """Maximum tokens of prompt and answer together, if the backend reports it."""
    streams: bool = False
    """Whether the client reports tokens as they are sampled, as the bundled engine's does."""
    url: str | None = None
    """URL of a ``tinker_cookbook.server``."""

    def prompt(self, messages: Sequence[Message]) -> tinker.ModelInput:
        """Returns the prompt for the next answer."""
        return self.model.renderer.build_generation_prompt(messages)

    async def answer(
        self, messages: Sequence[Message], choices: SamplingChoices, show: Show
    ) -> Answer:
        """Samples one answer and calls ``show`` with its pieces as they become final.

        Cancelling the task ends the sampling and returns the answer so far, as ``interrupted``.
        """
        renderer, prompt = self.model.renderer, self.prompt(messages)
        parser = renderer.response_parser()
        tokens: list[tuple[int, float]] = []

        def take(new: Sequence[tuple[int, float]]) -> None:
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
        # Prompts with images are sent through the SDK.
        if self.url and all(chunk.type == "encoded_text" for chunk in prompt.chunks):
            sample = self._stream_from_server
        try:
            await sample(prompt, params, take)
        except asyncio.CancelledError:
            ending = "interrupted"
        for delta in parser.finish():
            show(delta)
        if ending == "stop" and len(tokens) >= choices.max_tokens and not parser.termination:
            ending = "length"
        # A custom Renderer may parse a message that differs from the streamed pieces.
        ids = [token for token, _ in tokens]
        message, _ = renderer.parse_response(ids)
        codec = renderer.codec
        named = [AnswerToken(bytes(token_bytes(codec, t)), logprob) for t, logprob in tokens]
        logprobs = [logprob for _, logprob in tokens]
        reason = "stop" if ending == "stop" else "length"
        sampled = TokensWithLogprobs(ids, logprobs, reason, seed=choices.seed)
        return Answer(message, ending, named, prompt, sampled)

    async def _stream(
        self, prompt: tinker.ModelInput, params: tinker.SamplingParams, take: _Take
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
        self, prompt: tinker.ModelInput, params: tinker.SamplingParams, take: _Take
    ) -> None:
        response = await self.model.client.sample(
            prompt=prompt, num_samples=1, sampling_params=params
        )
        (sequence,) = response.sequences
        logprobs = sequence.logprobs or [float("nan")] * len(sequence.tokens)
        take(list(zip(sequence.tokens, logprobs, strict=True)))

    async def _stream_from_server(
        self, prompt: tinker.ModelInput, params: tinker.SamplingParams, take: _Take
    ) -> None:
        import httpx

        stops: Any = params.stop or []
        names = ("max_tokens", "temperature", "top_p", "seed")
        body = {
            "model": self.model.name,
            "token_ids": prompt.to_ints(),
            "stream": True,
            "sampling_params": {
                **{name: getattr(params, name) for name in names},
                "stop": [one for one in stops if isinstance(one, str)],
                "stop_token_ids": [one for one in stops if not isinstance(one, str)],
                "logprobs": 0,
            },
        }
        headers = {"Authorization": f"Bearer {os.environ.get('TINKER_API_KEY', '')}"}
        url, ended = f"{self.url}/inference/v1/generate", False
        try:
            # No time limit: an answer may wait for other requests, and Ctrl-C ends it.
            async with (
                httpx.AsyncClient(timeout=None, headers=headers) as http,
                http.stream("POST", url, json=body) as response,
            ):
                async for line in response.aiter_lines():
                    if response.status_code != 200 or "error" in line[:16]:
                        raise BackendError(
                            json.loads(line.removeprefix("data: "))["error"]["message"]
                        )
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
                        take(list(zip(choice["token_ids"], logprobs, strict=True)))
                        ended = choice["finish_reason"] is not None
        except httpx.HTTPError as error:
            raise BackendError(f"{url}: the answer ended early ({error!r})") from error
        if not ended:
            raise BackendError(f"{url}: the answer ended without a finish reason")


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
    url = await _server_url(connection) if connection.kind == "tinker" else None
    streams = connection.kind == "local"
    return [
        ChatModel(model, label, contexts.get(model.model_name), streams, url)
        for model, label in zip(models, labels, strict=True)
    ]


def short_names(names: Sequence[str]) -> list[str]:
    """Returns a short label for each model: the last part of its name, or more parts if that is not
    unique."""
    # Without the kind of weights, which is the same in most names.
    parts = [
        [word for word in name.removeprefix("tinker://").split("/") if word != "sampler_weights"]
        for name in names
    ]
    labels = []
    for words in parts:
        count = 1
        while count < len(words) and [w[-count:] for w in parts].count(words[-count:]) > 1:
            count += 1
        labels.append("/".join(words[-count:]))
    return labels


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


async def _server_url(connection: Connection) -> str | None:
    """Returns the server's URL if it is a ``tinker_cookbook.server``."""
    import httpx
    from tinker.lib.base_url import resolve_base_url

    _, given, *_ = connection.target
    url = resolve_base_url(given).rstrip("/")
    with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
        async with httpx.AsyncClient(timeout=_PROBE_SECONDS) as http:
            response = await http.get(f"{url}/healthz")
        if response.json().get("server") == "tinker_cookbook":
            return url
    return None
