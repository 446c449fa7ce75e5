"""OpenAI's asynchronous client over a sampling client, for libraries that take such a client.

``client.chat.completions.create`` and ``client.completions.create`` sample in this process. Their
responses have the exact token ids and log-probabilities where vLLM's server has them:
``response.prompt_token_ids``, ``choices[0].token_ids`` and ``logprobs``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, cast

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
from tinker_cookbook.recipes.verifiers_rl.driven_env import ModelCall
from tinker_cookbook.recipes.verifiers_rl.messages import openai_fields, prompt_of
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

_DEFAULT_MAX_TOKENS = 128
_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop")
# Parameters that are no settings of the sampling; responses have all of their information anyway.
_IGNORED = (
    "logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids", "user",
    "metadata", "store", "timeout", "extra_headers", "skip_special_tokens",
    "model", "messages", "prompt", "tools", "extra_body",
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
        if name in _SAMPLING and value is not None:
            settings[name] = value
        elif name not in _IGNORED and value and (name, value) != ("n", 1):
            raise ConfigurationError(
                f"{name}: got {value!r}, which TinkerAsyncOpenAIClient does not support"
                f"{nearest(name, _SAMPLING) or '; leave it out'}"
            )
    # The newer name has precedence, as in OpenAI's API.
    if newer := settings.pop("max_completion_tokens", None):
        settings["max_tokens"] = newer
    return settings


def _stop_of(given: str | list[str] | None, default: StopCondition) -> StopCondition:
    if given is None:
        return default
    return [given] if isinstance(given, str) else given


def _fields(
    kind: str, model: str, prompt: list[int], response: TokensWithLogprobs, choice: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of a completion; fields of vLLM's server, which OpenAI's types lack, stay
    as extras."""
    sampled = len(response.tokens)
    finish = "length" if response.stop_reason == "length" else "stop"
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": finish, "token_ids": response.tokens, **choice}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": sampled,
            "total_tokens": len(prompt) + sampled,
        },
    }


class TinkerChatCompletions(OpenAIAsyncChatCompletions):
    """``create`` renders the conversation, samples a response and parses it."""

    def __init__(self, parent: TinkerAsyncOpenAIClient) -> None:
        self._parent = parent

    async def create(self, *args: Any, **kwargs: Any) -> ChatCompletion:  # type: ignore[override]
        """Returns the next message of ``messages``, with tools if the chat format has them."""
        settings, renderer = _settings_of(kwargs), self._parent.renderer
        prompt = prompt_of(renderer, kwargs.get("messages", []), kwargs.get("tools"))
        stop = _stop_of(settings.pop("stop", None), renderer.get_stop_sequences())
        response = await self._parent.sample(prompt, stop, settings)
        message = openai_fields(renderer.parse_response(response.tokens)[0])
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(response.tokens, response.logprobs, strict=True)
        ]
        choice: dict[str, Any] = {"message": message, "logprobs": {"content": content}}
        if message.get("tool_calls") and response.stop_reason != "length":
            choice["finish_reason"] = "tool_calls"
        ids, model = prompt.to_ints(), kwargs.get("model", "tinker")
        fields = _fields("chatcmpl", model, ids, response, choice)
        return ChatCompletion.model_validate(
            {**fields, "object": "chat.completion", "prompt_token_ids": ids}
        )


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
            "text": tokenizer.decode(response.tokens),
            "logprobs": {"tokens": names, "token_logprobs": response.logprobs},
            "prompt_token_ids": ids,
        }
        fields = _fields("cmpl", kwargs.get("model", "tinker"), ids, response, choice)
        completion = Completion.model_validate({**fields, "object": "text_completion"})
        return TinkerAsyncCompletionStream(completion) if stream else completion


class TinkerAsyncChat(OpenAIAsyncChat):
    """``completions`` of a ``TinkerAsyncOpenAIClient``."""

    def __init__(self, parent: TinkerAsyncOpenAIClient) -> None:
        self._parent = parent

    @property
    def completions(self) -> OpenAIAsyncChatCompletions:
        """``chat.completions``."""
        return TinkerChatCompletions(self._parent)


class DrivenOpenAIClient(TinkerAsyncOpenAIClient):
    """Client of one rollout, whose calls the loop answers that runs it; of a call's settings only
    ``stop`` has an effect."""

    def __init__(self, call: ModelCall, renderer: Renderer, tokenizer: Tokenizer) -> None:
        super().__init__(cast(Any, None), renderer, tokenizer)
        self._call = call

    async def sample(
        self, prompt: tinker.ModelInput, stop: StopCondition, settings: Mapping[str, Any]
    ) -> TokensWithLogprobs:
        """Returns the response that the loop samples."""
        return await self._call(prompt, stop)


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
