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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
from tinker_cookbook.tokenizer_utils import get_tokenizer
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


def _prompt(
    renderer: renderers.Renderer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tinker.ModelInput:
    conversation = openai_messages_to_tinker(messages)
    if tools:
        system = ""
        if conversation and conversation[0]["role"] == "system":
            system = renderers.get_text_content(conversation.pop(0))
        specs = openai_tools_to_tinker(tools)
        prefix = renderer.create_conversation_prefix_with_tools(specs, system)
        conversation = [*prefix, *conversation]
    return renderer.build_generation_prompt(conversation)


def _sampling_params(
    optional_params: Mapping[str, Any], renderer: renderers.Renderer
) -> tinker.SamplingParams:
    """Reads a request's parameters; raises ConfigurationError for one without support."""
    given = {key: value for key, value in optional_params.items() if value is not None}
    for name, neutral in _UNSUPPORTED.items():
        if given.get(name, neutral[0]) not in neutral:
            raise ConfigurationError(
                f"{name}: got {given[name]!r:.80}, which the tinker provider does not support; "
                "leave it out, or use the server's OpenAI API"
            )
    given.setdefault("max_tokens", given.get("max_completion_tokens", 128))
    numbers: dict[str, Any] = {
        key: kind(given[key]) for key, kind in _NUMBERS.items() if key in given
    }
    return tinker.SamplingParams(stop=given.get("stop", renderer.get_stop_sequences()), **numbers)


def _choice(
    renderer: renderers.Renderer, sequence: Any, stop: str | list[Any] | None
) -> tuple[dict[str, Any], str]:
    """Returns the message in OpenAI's form, and the finish reason; ``stop`` is the request's."""
    parsed, termination = renderer.parse_response(sequence.tokens)
    (message,) = tinker_messages_to_openai([parsed])["messages"]
    content = renderers.format_content_as_string(message["content"] or "")
    at_stop = stop is not None and sequence.stop_reason == "stop"
    for text in ([stop] if isinstance(stop, str) else stop or ()) if at_stop else ():
        if isinstance(text, str):  # the tokens end with it, and OpenAI's content does not
            content = content.partition(text)[0]
    message["content"] = content or None
    for i, call in enumerate(message.get("tool_calls", ())):
        call.setdefault("id", f"call_{i}")
    if message.get("tool_calls"):
        return message, "tool_calls"
    return message, "stop" if termination.is_stop_sequence or at_stop else "length"


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
        self._models: dict[str, tuple[Any, renderers.Renderer]] = {}
        self._opening = threading.Lock()

    def _open(self, base_model: str, client: Any = None) -> tuple[Any, renderers.Renderer]:
        """Returns the client of a base model, or ``client`` from now on, and the renderer."""
        with self._opening:
            if base_model not in self._models or client is not None:
                if client is None:
                    self._service_client = self._service_client or connect().service
                    made = self._service_client.create_sampling_client(base_model=base_model)
                    client = made.result()
                name = get_recommended_renderer_name(base_model)
                renderer = renderers.get_renderer(name, get_tokenizer(base_model))
                self._models[base_model] = client, renderer
            return self._models[base_model]

    def set_client(self, sampling_client: SamplingClient | tinker.SamplingClient) -> None:
        """Samples with ``sampling_client`` from now on, for requests with its base model."""
        client: Any = sampling_client
        self._open(client.get_base_model(), client)

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
            # In a thread, since loading a model takes seconds.
            client, renderer = await asyncio.to_thread(self._open, base_model)
            params = _sampling_params(optional_params, renderer)
            prompt = _prompt(renderer, messages, optional_params.get("tools"))
            sampled = await client.sample(prompt=prompt, num_samples=1, sampling_params=params)
        except (tinker.TinkerError, TinkerCookbookError) as error:
            _raise_as_litellm_error(error)
        (sequence,) = sampled.sequences
        message, finish_reason = _choice(renderer, sequence, optional_params.get("stop"))
        fields = {
            "prompt_token_ids": prompt.to_ints(),
            "completion_token_ids": sequence.tokens,
            "completion_logprobs": sequence.logprobs,
        }
        answer = Message(**message, provider_specific_fields=fields)
        response: Any = model_response
        response.choices = [Choices(finish_reason=finish_reason, index=0, message=answer)]
        counts = prompt.length, len(sequence.tokens)
        response.usage = Usage(*counts, sum(counts))
        response.model = model
        return response

    def completion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """As ``acompletion``, and waits for the response."""
        # In a thread of its own, since the caller's may run an event loop, as in a notebook.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self.acompletion(*args, **kwargs)).result()

    def streaming(self, *_: Any, **__: Any) -> Any:
        """Raises BadRequestError; the responses are not streamed."""
        problem = ConfigurationError("stream: got True, but the tinker provider does not stream")
        _raise_as_litellm_error(problem)

    astreaming = streaming


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
