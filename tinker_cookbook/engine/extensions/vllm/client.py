"""The HTTP API of a vLLM server, as far as sampling needs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tinker_cookbook.exceptions import BackendError, ConfigurationError

_MOST_CONNECTIONS = 512
"""Requests that are open at a time; further ones wait here, as they would in the server."""
_SHORT_SECONDS = 10.0
"""Timeout of connecting, and of requests that compute nothing."""
_LOOK_SECONDS = 60.0
_GONE_SECONDS = 2.0
_START_HINT = (
    "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment and the flags "
    "--enable-lora --max-lora-rank 32"
)
_RESUME = "A run can be resumed from its last checkpoint"


@dataclass(frozen=True)
class ServedModel:
    """The base model of a server: ``name`` in requests, ``root`` (folder or Hub name)."""

    name: str
    root: str
    max_length: int | None


@dataclass
class Choice:
    """One sample in a response: tokens [T], log-probabilities [T], and the most probable ones."""

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]
    stopped: bool


class VLLMClient:
    """Speaks to one server. Its methods run in the event loop of ``connect``'s caller.

    Args:
        url: Address without ``/v1``.
        key: Sent as bearer token, if any.
        timeout: Seconds after which a sampling request fails.
        exit_reason: Called when the connection fails. Returns why the process ended, None while it
            runs, and "" if that is not known.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        timeout: float,
        exit_reason: Callable[[], str | None] = lambda: "",
    ) -> None:
        self.url, self._timeout, self._exit_reason = url, timeout, exit_reason
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_SHORT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_MOST_CONNECTIONS),
            trust_env=False,  # requests to this machine must not go through a proxy
        )
        self._open = asyncio.Semaphore(_MOST_CONNECTIONS)

    async def healthy(self) -> bool:
        """Returns whether the server answers and its engine works."""
        try:
            return (await self._http.get("/health", timeout=_SHORT_SECONDS)).status_code == 200
        except httpx.HTTPError:
            return False

    async def complete(self, body: Mapping[str, Any]) -> tuple[list[Choice], int]:
        """Returns the samples of ``/v1/completions`` and the number of cached prompt tokens."""
        # Waiting for a free connection does not count towards the timeout: the server is not slow.
        async with self._open:
            found = (await self.post("/v1/completions", body)).json()
        details = (found.get("usage") or {}).get("prompt_tokens_details") or {}
        choices = sorted(found["choices"], key=lambda choice: choice["index"])
        return [_choice_of(choice) for choice in choices], int(details.get("cached_tokens") or 0)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[tuple[int, Choice], None]:
        """Yields parts of samples as they arrive, each with its sample's index."""
        async with self._open, self._errors("/v1/completions"), asyncio.timeout(self._timeout):
            call = self._http.stream("POST", "/v1/completions", json={**body, "stream": True})
            async with call as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise self._refused(response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        part = json.loads(data)
                        if "error" in part:
                            raise BackendError(f"{self._server}: {part['error']}")
                        for choice in part["choices"]:
                            yield choice["index"], _choice_of(choice)

    async def close(self) -> None:
        """Closes all connections; the server then aborts their requests."""
        await self._http.aclose()

    @property
    def _server(self) -> str:
        return f"the vLLM server at {self.url}"

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Sends a request; raises ``BackendError`` if it is refused or not answered in time."""
        async with self._errors(path), asyncio.timeout(self._timeout):
            response = await self._http.post(path, json=dict(body))
        if response.status_code >= 400:
            raise self._refused(response)
        return response

    @contextlib.asynccontextmanager
    async def _errors(self, path: str) -> AsyncIterator[None]:
        """Converts connection errors to a ``BackendError`` that names the next step."""
        try:
            yield
        except TimeoutError as error:
            raise BackendError(
                f"{self._server} gave no answer to {path} within {self._timeout:g} s; raise "
                f"vllm_timeout, or look at the server's log. {_RESUME}"
            ) from error
        except httpx.HTTPError as error:
            reason = await self._reason(error)
            raise BackendError(
                f"{self._server} did not answer {path} ({reason}). {_RESUME}, once the server "
                "runs again"
            ) from error

    async def _reason(self, error: Exception) -> str:
        # A killed process closes its connections before its exit code is available.
        until = asyncio.get_running_loop().time() + _GONE_SECONDS
        while (reason := self._exit_reason()) is None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        return reason or f"{type(error).__name__}: {error}".rstrip(": ")

    def _refused(self, response: httpx.Response) -> BackendError:
        message = _message(response)
        path = response.request.url.path
        advice = ""
        if response.status_code == 401:
            advice = "; set VLLM_API_KEY to its key"
        elif "lora" in path and response.status_code == 404:
            advice = f"; {_START_HINT}"
        elif "lora rank" in message.lower() or "max_lora_rank" in message:
            advice = "; start vLLM with a larger --max-lora-rank (vllm_args), or lower lora_rank"
        elif "target modules" in message:
            advice = (
                "; vLLM has no adapters on the head of this model: set train_unembed=False, or "
                "sampler=builtin"
            )
        return BackendError(
            f"{self._server} refused {path} ({response.status_code}): {message}{advice}"
        )


def probe_server(url: str, key: str | None) -> ServedModel:
    """Returns the base model of a running server; blocks for at most two minutes.

    Raises:
        ConfigurationError: Nothing answers there, or the server cannot load adapters.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # On a busy machine the first request for the API description takes seconds.
    timeout = httpx.Timeout(_LOOK_SECONDS, connect=_SHORT_SECONDS)
    paths: httpx.Response | None = None
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as http:
            models = http.get("/v1/models")
            with contextlib.suppress(httpx.ReadTimeout):  # the first adapter will show it
                paths = http.get("/openapi.json")
    except httpx.HTTPError as error:
        raise ConfigurationError(
            f"sampler: got {url}, but nothing answers there ({type(error).__name__}: {error}); "
            "expected the address of a running vLLM server, or sampler=vllm to start one"
        ) from error
    if models.status_code != 200:
        hint = "; set VLLM_API_KEY to its key" if models.status_code == 401 else ""
        raise ConfigurationError(
            f"sampler: got {url}, which answers /v1/models with {models.status_code}; expected a "
            f"vLLM server{hint}"
        )
    # A server may disable its API description.
    described = paths.json().get("paths", {}) if paths and paths.status_code == 200 else None
    if described is not None and "/v1/load_lora_adapter" not in described:
        raise ConfigurationError(
            f"sampler: got {url}, a server that cannot load adapters while it runs; {_START_HINT}"
        )
    base = next(card for card in models.json()["data"] if not card.get("parent"))
    return ServedModel(base["id"], base.get("root") or base["id"], base.get("max_model_len"))


def _message(response: httpx.Response) -> str:
    try:
        found = response.json()
    except ValueError:
        return response.text[:500] or response.reason_phrase
    error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]


def _choice_of(choice: Mapping[str, Any]) -> Choice:
    scores = choice.get("logprobs") or {}
    tokens = choice.get("token_ids")
    if tokens is None:
        raise BackendError(
            "the vLLM server returned no token_ids: it is older than 0.11, which has "
            "return_token_ids; upgrade it"
        )
    # vLLM sends null for a NaN: the caller reports that the weights have diverged.
    logprobs = [math.nan if lp is None else float(lp) for lp in scores.get("token_logprobs") or []]
    # Keys have the form ``token_id:7``, since different tokens may have the same text.
    top = [
        {int(key.rpartition(":")[2]): float(lp) for key, lp in (entry or {}).items()}
        for entry in scores.get("top_logprobs") or []
    ]
    return Choice(list(tokens), logprobs, top, choice.get("finish_reason") == "stop")
