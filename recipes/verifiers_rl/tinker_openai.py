"""OpenAI's asynchronous client over a sampling client, for libraries that take such a client.

``client.chat.completions.create`` and ``client.completions.create`` sample in this process. Their
responses have the exact token ids and log-probabilities where vLLM's server has them:
``response.prompt_token_ids``, ``choices[0].token_ids`` and ``logprobs``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

import tinker
from openai import AsyncOpenAI
from openai._streaming import AsyncStream
from openai.resources.chat import AsyncChat as OpenAIAsyncChat
from openai.resources.chat.completions import AsyncCompletions as OpenAIAsyncChatCompletions
from openai.resources.completions import AsyncCompletions as OpenAIAsyncCompletions
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion

from tinker_cookbook.backends.protocols import SamplingClient
from tinker_cookbook.completers import StopCondition, TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.recipes.verifiers_rl.messages import openai_fields, prompt_of
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

_DEFAULT_MAX_TOKENS = 128
_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop")
# Parameters without an effect on the tokens: responses have all of their information anyway.
_IGNORED = (
    "logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids", "user",
    "metadata", "store", "timeout", "extra_headers", "skip_special_tokens",
)  # fmt: skip


class TinkerAsyncOpenAIClient(AsyncOpenAI):
    """OpenAI client that samples from a sampling client instead of calling a server."""

    def __init__(
        self, sampling_client: SamplingClient, renderer: Renderer, tokenizer: Tokenizer
    ) -> None:
        super().__init__(api_key="tinker", base_url="http://localhost")
        self.sampling_client = sampling_client
        self.renderer = renderer
        self.tokenizer = tokenizer

    def set_sampling_client(self, sampling_client: SamplingClient) -> None:
        """Samples from another client from now on, for example from newer weights."""
        self.sampling_client = sampling_client

    @property
    def chat(self) -> OpenAIAsyncChat:
        """``chat.completions`` of this client."""
        return TinkerAsyncChat(self)

    @property
    def completions(self) -> OpenAIAsyncCompletions:
        """``completions`` of this client."""
        return TinkerCompletions(self)

    async def sample(
        self, prompt: tinker.ModelInput, stop: StopCondition, settings: Mapping[str, Any]
    ) -> TokensWithLogprobs:
        """Returns one response; ``settings`` are OpenAI's parameters that were given."""
        policy = TinkerTokenCompleter(
            self.sampling_client,
            int(settings.get("max_tokens") or _DEFAULT_MAX_TOKENS),
            float(settings.get("temperature", 1.0)),
            top_p=float(settings.get("top_p", 1.0)),
            top_k=int(settings.get("top_k", -1)),
            seed=settings.get("seed"),
        )
        return await policy(prompt, stop)


def _settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters of a call.

    Raises:
        ConfigurationError: A parameter would change the response, but is not supported.
    """
    arguments = {**arguments, **(arguments.get("extra_body") or {})}
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        neutral = value is None or value in ([], {}, False) or (name == "n" and value == 1)
        if name in ("model", "messages", "prompt", "tools", "extra_body") or name in _IGNORED:
            continue
        if name in _SAMPLING:
            settings[name] = value
        elif not neutral:
            hint = nearest(name, [*_SAMPLING, *_IGNORED]) or "; leave it out"
            raise ConfigurationError(
                f"{name}: got {value!r}, which TinkerAsyncOpenAIClient does not support{hint}"
            )
    # The newer name has precedence, as in OpenAI's API.
    newer = settings.pop("max_completion_tokens", None)
    if newer is not None:
        settings["max_tokens"] = newer
    return {name: value for name, value in settings.items() if value is not None}


def _stop_of(given: str | list[str] | None, default: StopCondition) -> StopCondition:
    if given is None:
        return default
    return [given] if isinstance(given, str) else given


def _usage(prompt: list[int], response: TokensWithLogprobs) -> dict[str, int]:
    sampled = len(response.tokens)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": sampled,
        "total_tokens": len(prompt) + sampled,
    }


def _finish_reason(response: TokensWithLogprobs) -> str:
    return "length" if response.stop_reason == "length" else "stop"


class TinkerChatCompletions(OpenAIAsyncChatCompletions):
    """``create`` renders the conversation, samples a response and parses it."""

    def __init__(self, parent: TinkerAsyncOpenAIClient) -> None:
        self._parent = parent

    async def create(self, *args: Any, **kwargs: Any) -> ChatCompletion:  # type: ignore[override]
        """Returns the next message of ``messages``, with tools if the chat format has them."""
        if kwargs.get("stream"):
            raise ConfigurationError(
                "stream=True: TinkerAsyncOpenAIClient returns whole chat completions; leave "
                "stream out"
            )
        settings, renderer = _settings_of(kwargs), self._parent.renderer
        prompt = prompt_of(renderer, kwargs.get("messages", []), kwargs.get("tools"))
        stop = _stop_of(settings.pop("stop", None), renderer.get_stop_sequences())
        response = await self._parent.sample(prompt, stop, settings)
        message = openai_fields(renderer.parse_response(response.tokens)[0])
        finish = _finish_reason(response)
        if message.get("tool_calls") and finish == "stop":
            finish = "tool_calls"
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(response.tokens, response.logprobs, strict=True)
        ]
        choice = {"index": 0, "message": message, "finish_reason": finish}
        prompt_ids = prompt.to_ints()
        completion = ChatCompletion.model_validate(
            {
                "id": f"chatcmpl-{secrets.token_hex(12)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": kwargs.get("model", "tinker"),
                "choices": [{**choice, "logprobs": {"content": content}}],
                "usage": _usage(prompt_ids, response),
            }
        )
        # Fields of vLLM's server that OpenAI's types lack.
        object.__setattr__(completion, "prompt_token_ids", prompt_ids)
        object.__setattr__(completion.choices[0], "token_ids", response.tokens)
        return completion


class TinkerCompletions(OpenAIAsyncCompletions):
    """``create`` continues a text, or token ids."""

    def __init__(self, parent: TinkerAsyncOpenAIClient) -> None:
        self._parent = parent

    async def create(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> Completion | AsyncStream[Completion]:
        """Returns the continuation of ``prompt``; with ``stream`` as a stream of one chunk."""
        stream = bool(kwargs.pop("stream", False))
        settings, prompt = _settings_of(kwargs), kwargs.get("prompt", "")
        tokenizer = self._parent.tokenizer
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        stop = _stop_of(settings.pop("stop", None), [])
        response = await self._parent.sample(tinker.ModelInput.from_ints(ids), stop, settings)
        names = [f"token_id:{token}" for token in response.tokens]
        choice = {
            "index": 0,
            "text": tokenizer.decode(response.tokens),
            "finish_reason": _finish_reason(response),
            "logprobs": {"tokens": names, "token_logprobs": response.logprobs},
        }
        completion = Completion.model_validate(
            {
                "id": f"cmpl-{secrets.token_hex(12)}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": kwargs.get("model", "tinker"),
                "choices": [choice],
                "usage": _usage(ids, response),
            }
        )
        object.__setattr__(completion.choices[0], "prompt_token_ids", ids)
        object.__setattr__(completion.choices[0], "token_ids", response.tokens)
        return TinkerAsyncCompletionStream(completion) if stream else completion


class TinkerAsyncChat(OpenAIAsyncChat):
    """``completions`` of a ``TinkerAsyncOpenAIClient``."""

    def __init__(self, parent: TinkerAsyncOpenAIClient) -> None:
        self._parent = parent

    @property
    def completions(self) -> OpenAIAsyncChatCompletions:
        """``chat.completions``."""
        return TinkerChatCompletions(self._parent)


class TinkerAsyncCompletionStream(AsyncStream[Completion]):
    """Stream with the whole completion as its only chunk."""

    def __init__(self, final: Completion) -> None:
        self._final = final
        self._sent = False

    def __aiter__(self) -> TinkerAsyncCompletionStream:
        return self

    async def __anext__(self) -> Completion:
        if self._sent:
            raise StopAsyncIteration
        self._sent = True
        return self._final

    async def get_final_response(self) -> Completion:
        """Returns the whole completion."""
        return self._final
