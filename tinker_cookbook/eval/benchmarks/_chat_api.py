"""Answers of any server with the OpenAI chat API, such as vLLM, Ollama or api.openai.com."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tinker_cookbook.eval.benchmarks._files import key_of
from tinker_cookbook.eval.benchmarks._sources import (
    Answer,
    AnswerSource,
    ContextOverflowError,
    Prompt,
    messages_text,
    sampling_description,
    split_thinking,
)
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.exceptions import BackendError, ConfigurationError, nearest
from tinker_cookbook.renderers import Message
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import httpx
else:
    httpx = lazy_module("httpx")

_TRIES = 5
_BUSY = (408, 429, 500, 502, 503, 504)


class ChatApiSource(AnswerSource):
    """Sends messages to ``URL/chat/completions``; the server applies the chat format.

    Use it as an asynchronous context manager; entering it checks that the server has the model.
    """

    def __init__(
        self, url: str, model_name: str, api_key: str | None, config: BenchmarkConfig
    ) -> None:
        self.url, self.model_name, self.config = url.rstrip("/"), model_name, config
        self.model_id = config.model_id or f"{self.url} {model_name}"
        # A server without keys ignores it.
        headers = {"Authorization": f"Bearer {api_key or 'none'}"}
        limits = httpx.Limits(max_connections=config.concurrency)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=config.timeout_seconds, limits=limits
        )
        self._max_tokens_name = "max_tokens"
        self._context: int | None = config.context_window

    async def __aenter__(self) -> Self:
        try:
            response = await self._http.get(f"{self.url}/models")
            models = response.json()["data"] if response.status_code == 200 else []
        except httpx.HTTPError as error:
            await self._http.aclose()
            raise BackendError(
                f"openai_url: {self.url} cannot be reached ({type(error).__name__}: {error}); "
                "expected the address of a server, which usually ends in /v1"
            ) from error
        except (KeyError, TypeError, ValueError):
            models = []  # some servers have no list of models
        known = {str(model.get("id")): model for model in models if isinstance(model, dict)}
        if known and self.model_name not in known:
            await self._http.aclose()
            hint = nearest(self.model_name, known) or f"; it has {', '.join(sorted(known)[:10])}"
            raise ConfigurationError(
                f"model_name: {self.url} has no model {self.model_name!r}{hint}"
            )
        # vLLM, and our server, say how long a conversation may be.
        length = known.get(self.model_name, {}).get("max_model_len")
        self._context = self._context or (int(length) if length else None)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    def description(self) -> dict[str, Any]:
        """Returns the sampling settings; the chat format is the server's."""
        return {"renderer": "server", **sampling_description(self.config)}

    def render(self, messages: list[Message]) -> Prompt:
        """Returns the messages as JSON."""
        value = [{"role": role, "content": text} for role, text in messages_text(messages)]
        return Prompt(key_of({"messages": value}), value, None)

    async def sample(self, prompt: Prompt, num_samples: int, seed: int | None) -> list[Answer]:
        """Requests all answers at once; the rest again if the server returns fewer."""
        answers: list[Answer] = []
        while len(answers) < num_samples:
            missing = num_samples - len(answers)
            shifted = None if seed is None else seed + len(answers)
            body = await self._post(self._body(prompt, missing, shifted))
            choices = body.get("choices") or []
            if not choices:
                raise BackendError(f"{self.url}: got no choice, expected one at least")
            tokens = (body.get("usage") or {}).get("completion_tokens") or 0
            # The usage is the sum over the choices.
            answers += [_answer(choice, tokens // len(choices)) for choice in choices[:missing]]
        return answers

    def _body(self, prompt: Prompt, num_samples: int, seed: int | None) -> dict[str, Any]:
        config = self.config
        # Characters are more than tokens, so this never asks for more than the context has.
        limit = config.max_tokens
        if self._context is not None:
            limit = min(limit, max(1, self._context - self._estimate(prompt)))
        body: dict[str, Any] = {
            "model": self.model_name,
            "messages": prompt.value,
            "temperature": config.temperature,
            "top_p": config.top_p,
            self._max_tokens_name: limit,
        }
        # Sent only if they are set: some servers refuse what they do not know.
        optional = {"n": num_samples if num_samples > 1 else None, "seed": seed}
        optional["top_k"] = config.top_k if config.top_k > 0 else None
        return body | {name: value for name, value in optional.items() if value is not None}

    def _estimate(self, prompt: Prompt) -> int:
        """Returns a rough upper bound of the prompt's tokens; the server knows them exactly."""
        characters = sum(len(message["content"]) for message in prompt.value)
        return characters // 2 + 16 * (1 + len(prompt.value))

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the response; a busy server is tried again after a pause that doubles."""
        last = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(0.5 * 2**attempt)
            try:
                response = await self._http.post(f"{self.url}/chat/completions", json=body)
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return dict(response.json())
            last = f"{response.status_code}: {_message_of(response)}"
            if response.status_code in _BUSY:
                continue
            # OpenAI's reasoning models know the limit by another name.
            if "max_completion_tokens" in last and "max_tokens" in body:
                self._max_tokens_name = "max_completion_tokens"
                body[self._max_tokens_name] = body.pop("max_tokens")
                continue
            if "context" in last and ("length" in last or "window" in last):
                raise ContextOverflowError(last)
            break
        raise BackendError(f"{self.url}: {last}")


def _answer(choice: dict[str, Any], tokens: int) -> Answer:
    message = choice.get("message") or {}
    content = message.get("content") or ""
    # vLLM, DeepSeek and others return thinking separately, under one of two names.
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    text, inline = split_thinking(content)
    truncated = choice.get("finish_reason") == "length"
    return Answer(text, tokens, truncated, str(thinking or inline))


def _message_of(response: httpx.Response) -> str:
    try:
        error = response.json().get("error") or response.json()
    except (ValueError, AttributeError):
        return response.text[:300]
    text = error.get("message") or json.dumps(error) if isinstance(error, dict) else error
    return str(text)[:300]
