"""Client of any server with the OpenAI chat API, such as vLLM, Ollama or api.openai.com."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from tinker_cookbook.exceptions import BackendError, ConfigurationError, nearest
from tinker_cookbook.utils.imports import httpx

_TRIES = 5
_BUSY = (408, 429, 500, 502, 503, 504)


class ContextOverflowError(Exception):
    """The prompt leaves no room for an answer in the context window."""


class ChatApi:
    """Sends requests to ``URL/chat/completions``; a busy server is tried again.

    Use it as an asynchronous context manager, or call ``open`` and ``close``.

    Args:
        url: Address of the server, which usually ends in ``/v1``.
        model_name: The server's name of the model.
        api_key: Sent as a bearer token; a server without keys ignores it.
        field: Name of the setting of ``url``, for messages.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 300.0,
        max_connections: int = 64,
        field: str = "openai_url",
    ) -> None:
        self.url, self.model_name, self._field = url.rstrip("/"), model_name, field
        self.max_model_len: int | None = None
        """Total tokens of prompt and answer, if the server reports them."""
        self.max_tokens_name = "max_tokens"
        """The server's name for the limit on new tokens."""
        self._settings: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {api_key or 'none'}"},
            "timeout": timeout_seconds,
            "limits": httpx.Limits(max_connections=max_connections),
        }
        # A client belongs to one event loop, and groups may run in threads with separate loops.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            WeakKeyDictionary()
        )

    @property
    def _http(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(**self._settings)
        return self._clients[loop]

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> Self:
        """Checks that the server can be reached and has the model; closes itself if not."""
        try:
            response = await self._http.get(f"{self.url}/models")
            models = response.json()["data"] if response.status_code == 200 else []
        except httpx.HTTPError as error:
            await self.close()
            raise BackendError(
                f"{self._field}: {self.url} cannot be reached ({type(error).__name__}: {error}); "
                "expected the address of a server, which usually ends in /v1"
            ) from error
        except (KeyError, TypeError, ValueError):
            models = []  # some servers have no list of models
        known = {str(model.get("id")): model for model in models if isinstance(model, dict)}
        if known and self.model_name not in known:
            await self.close()
            hint = nearest(self.model_name, known) or f"; it has {', '.join(sorted(known)[:10])}"
            raise ConfigurationError(
                f"model_name: {self.url} has no model {self.model_name!r}{hint}"
            )
        # vLLM, and our server, say how long a conversation may be.
        length = known.get(self.model_name, {}).get("max_model_len")
        self.max_model_len = int(length) if length else None
        return self

    async def close(self) -> None:
        """Closes the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def choices(
        self, messages: list[dict[str, Any]], max_tokens: int, temperature: float, **more: Any
    ) -> tuple[list[dict[str, Any]], int]:
        """Returns the choices of one request, at least one, and the sum of their tokens.

        ``more`` are further fields of the request; those that are ``None`` are left out, since some
        servers refuse unknown parameters.
        """
        body = {
            "model": self.model_name,
            "messages": messages,
            "temperature": temperature,
            self.max_tokens_name: max_tokens,
            **{name: value for name, value in more.items() if value is not None},
        }
        answer = await self.post(body)
        if not (choices := answer.get("choices")):
            raise BackendError(f"{self.url}: got no choice, expected at least one")
        return choices, (answer.get("usage") or {}).get("completion_tokens") or 0

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the response; a busy server is tried again after a pause that doubles.

        Raises:
            ContextOverflowError: The prompt is too long for the model.
            BackendError: The server refused the request, or stayed busy.
        """
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
                self.max_tokens_name = "max_completion_tokens"
                body[self.max_tokens_name] = body.pop("max_tokens")
                continue
            if "context" in last and ("length" in last or "window" in last):
                raise ContextOverflowError(last)
            break
        raise BackendError(f"{self.url}: {last}")


def _message_of(response: httpx.Response) -> str:
    try:
        error = response.json().get("error") or response.json()
    except (ValueError, AttributeError):
        return response.text[:300]
    text = error.get("message") or json.dumps(error) if isinstance(error, dict) else error
    return str(text)[:300]
