"""LiteLLM's ``tinker`` provider: chat completions by sampling clients, with the token ids.

    from tinker_cookbook import backends
    from tinker_cookbook.third_party.litellm import register_litellm_provider

    register_litellm_provider(service_client=backends.connect("local").service)
    response = await litellm.acompletion(
        model="tinker/any-label", messages=messages, base_model="Qwen/Qwen3-0.6B"
    )
    fields = response.choices[0].message.provider_specific_fields

``base_model`` is a Hub name or a local folder; ``set_client`` replaces its client by that of a
checkpoint. ``fields`` has ``prompt_token_ids``, ``completion_token_ids`` and
``completion_logprobs``, for training on the response.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import tinker

from tinker_cookbook import renderers
from tinker_cookbook.backends import SamplingClient, ServiceClient, connect
from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.third_party.openai_compat import (
    openai_messages_to_tinker,
    openai_tools_to_tinker,
    tinker_messages_to_openai,
)
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer
from tinker_cookbook.utils.imports import missing_extra

try:
    # Not by a statement: a type checker would take this package for it.
    litellm: Any = import_module("litellm")
    from litellm.llms.custom_llm import CustomLLM
    from litellm.types.utils import Choices, Message, Usage
except ImportError as error:
    raise missing_extra("LiteLLM providers", error, "litellm") from error

if TYPE_CHECKING:
    from litellm.types.utils import ModelResponse

_NUMBERS = {"temperature": float, "max_tokens": int, "top_p": float, "top_k": int, "seed": int}
# Parameters that would change the response, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
}
# LiteLLM's errors for the SDK's, by which its callers decide whether to try again.
_ERRORS = {
    tinker.AuthenticationError: "AuthenticationError",
    tinker.RateLimitError: "RateLimitError",
    tinker.APITimeoutError: "Timeout",
    tinker.APIConnectionError: "APIConnectionError",
    tinker.BadRequestError: "BadRequestError",
    TinkerCookbookError: "BadRequestError",
}


@dataclass
class _SamplingResult:
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float] | None
    parsed_message: renderers.Message
    termination: renderers.ParseTermination
    model_name: str
    stop: list[str] | None = None
    """The stop texts of the request, if the response ended with one of them."""


@dataclass
class _ClientBundle:
    sampling_client: SamplingClient
    renderer: renderers.Renderer
    tokenizer: Tokenizer
    base_model: str


def _prepare_messages_with_tools(
    renderer: renderers.Renderer, messages: list[renderers.Message], tools: list[dict[str, Any]]
) -> list[renderers.Message]:
    system = ""
    if messages and messages[0]["role"] == "system":
        system, messages = renderers.get_text_content(messages[0]), messages[1:]
    specs = openai_tools_to_tinker(tools)
    return [*renderer.create_conversation_prefix_with_tools(specs, system), *messages]


async def _sample_chat_completion(
    sampling_client: SamplingClient,
    renderer: renderers.Renderer,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    stop: str | list[str] | list[int] | None = None,
    model_name: str = "tinker",
    **params: Any,
) -> _SamplingResult:
    conversation = openai_messages_to_tinker(messages)
    if tools:
        conversation = _prepare_messages_with_tools(renderer, conversation, tools)
    prompt = renderer.build_generation_prompt(conversation)
    ends: Any = renderer.get_stop_sequences() if stop is None else stop
    response = await sampling_client.sample(
        prompt=prompt,
        num_samples=1,
        sampling_params=tinker.SamplingParams(stop=ends, **{"max_tokens": 128, **params}),
    )
    (sequence,) = response.sequences
    parsed, termination = renderer.parse_response(sequence.tokens)
    texts = [stop] if isinstance(stop, str) else [s for s in stop or () if isinstance(s, str)]
    return _SamplingResult(
        prompt_token_ids=prompt.to_ints(),
        completion_token_ids=sequence.tokens,
        logprobs=sequence.logprobs,
        parsed_message=parsed,
        termination=termination,
        model_name=model_name,
        stop=texts if stop is not None and sequence.stop_reason == "stop" else None,
    )


def _sampling_result_to_chat_completion_dict(result: _SamplingResult) -> dict[str, Any]:
    """Returns the response in OpenAI's form; thinking is its ``reasoning_content``."""
    (message,) = tinker_messages_to_openai([result.parsed_message])["messages"]
    content = renderers.format_content_as_string(message["content"] or "")
    for text in result.stop or ():  # the tokens end with it, and OpenAI's content does not
        content = content.partition(text)[0]
    message["content"] = content or None
    for i, call in enumerate(message.get("tool_calls", ())):
        call.setdefault("id", f"call_{i}")
    stopped = result.termination.is_stop_sequence or result.stop is not None
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop" if stopped else "length"
    prompt, completion = len(result.prompt_token_ids), len(result.completion_token_ids)
    return {
        "id": f"chatcmpl-tinker-{uuid.uuid4().hex[:12]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": result.model_name,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }


def _extract_sampling_params(optional_params: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in optional_params.items() if value is not None}
    given.setdefault("max_tokens", given.get("max_completion_tokens"))
    params = {key: kind(given[key]) for key, kind in _NUMBERS.items() if given.get(key) is not None}
    return params | ({"stop": given["stop"]} if "stop" in given else {})


def _check_supported(optional_params: Mapping[str, Any]) -> None:
    for name, neutral in _UNSUPPORTED.items():
        value = optional_params.get(name)
        if value is not None and value not in neutral:
            raise ConfigurationError(
                f"{name}: got {value!r:.80}, which the tinker provider does not support; leave it "
                "out, or use the server's OpenAI API"
            )


def _build_model_response(result: _SamplingResult, response: Any) -> ModelResponse:
    completion = _sampling_result_to_chat_completion_dict(result)
    (choice,) = completion["choices"]
    fields = {
        "prompt_token_ids": result.prompt_token_ids,
        "completion_token_ids": result.completion_token_ids,
        "completion_logprobs": result.logprobs,
    }
    message = Message(**choice["message"], provider_specific_fields=fields)
    response.choices = [Choices(finish_reason=choice["finish_reason"], index=0, message=message)]
    response.usage = Usage(**completion["usage"])
    response.model = result.model_name
    return response


def _raise_as_litellm_error(error: Exception) -> NoReturn:
    for kind, name in _ERRORS.items():
        if isinstance(error, kind):
            raised = getattr(litellm.exceptions, name)
            raise raised(message=str(error), llm_provider="tinker", model="") from error
    raise error


class TinkerLiteLLMProvider(CustomLLM):
    """Samples with the clients of a service, one for each base model.

    Args:
        service_client: ``connect(...).service``, or the SDK's client; default: that of
            ``connect()``, so the bundled engine where no Tinker key is set.
    """

    def __init__(self, service_client: ServiceClient | tinker.ServiceClient | None = None) -> None:
        super().__init__()
        self._service_client: Any = service_client
        self._clients: dict[str, _ClientBundle] = {}
        self._opening = threading.Lock()

    def _get_or_create_client(self, base_model: str) -> _ClientBundle:
        with self._opening:
            if base_model not in self._clients:
                self._service_client = self._service_client or connect().service
                client = self._service_client.create_sampling_client(base_model=base_model)
                self._clients[base_model] = self._bundle(base_model, client.result())
            return self._clients[base_model]

    def _bundle(self, base_model: str, client: Any) -> _ClientBundle:
        tokenizer = get_tokenizer(base_model)
        name = get_recommended_renderer_name(base_model)
        return _ClientBundle(client, renderers.get_renderer(name, tokenizer), tokenizer, base_model)

    def set_client(self, sampling_client: SamplingClient | tinker.SamplingClient) -> None:
        """Samples with ``sampling_client`` from now on, for requests with its base model."""
        client: Any = sampling_client
        base_model = client.get_base_model()
        if base_model in self._clients:
            self._clients[base_model].sampling_client = client
        else:
            self._clients[base_model] = self._bundle(base_model, client)

    async def acompletion(
        self,
        model: str,
        messages: list[dict[str, Any]],
        *_: Any,
        model_response: ModelResponse,
        optional_params: dict[str, Any],
        litellm_params: dict[str, Any] | None = None,
        **__: Any,
    ) -> ModelResponse:
        """Answers LiteLLM's request; its ``base_model`` is required."""
        base_model = (litellm_params or {}).get("base_model")
        if not base_model:
            raise ConfigurationError(
                "base_model is required by the tinker provider: a Hub name or local folder, as in "
                "litellm.acompletion(…, base_model='Qwen/Qwen3-0.6B')"
            )
        try:
            _check_supported(optional_params)
            bundle = self._clients.get(base_model)
            if bundle is None:  # in a thread, since loading a model takes seconds
                bundle = await asyncio.to_thread(self._get_or_create_client, base_model)
            result = await _sample_chat_completion(
                bundle.sampling_client,
                bundle.renderer,
                messages,
                tools=optional_params.get("tools"),
                model_name=model,
                **_extract_sampling_params(optional_params),
            )
        except (tinker.TinkerError, TinkerCookbookError) as error:
            _raise_as_litellm_error(error)
        return _build_model_response(result, model_response)

    def completion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """As ``acompletion``, and waits for the response."""
        # In a thread of its own, since the caller's may run an event loop, as in a notebook.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self.acompletion(*args, **kwargs)).result()

    def streaming(self, *_: Any, **__: Any) -> NoReturn:
        """Raises BadRequestError; the responses are not streamed."""
        _raise_as_litellm_error(
            ConfigurationError("stream: got True, but the tinker provider does not stream")
        )

    def astreaming(self, *_: Any, **__: Any) -> Any:
        """As ``streaming``."""
        self.streaming()


_registered_provider: TinkerLiteLLMProvider | None = None


def register_litellm_provider(
    *, service_client: ServiceClient | tinker.ServiceClient | None = None
) -> TinkerLiteLLMProvider:
    """Adds the provider to LiteLLM, for models named ``tinker/…``, and returns it.

    Later calls return the same provider and ignore ``service_client``.
    """
    global _registered_provider
    if _registered_provider is None:
        _registered_provider = TinkerLiteLLMProvider(service_client)
        entry = {"provider": "tinker", "custom_handler": _registered_provider}
        litellm.custom_provider_map.append(entry)
    return _registered_provider
