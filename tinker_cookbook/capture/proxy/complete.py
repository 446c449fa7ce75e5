"""Answers a chat request: renders it, samples in the scope of its address, parses the tokens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import tinker

from tinker_cookbook.capture.scope import ScopeValue, capture
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import Message, ParseTermination, Renderer, ToolSpec
from tinker_cookbook.server.bodies import Json
from tinker_cookbook.server.openai.completions import answer_of, chat_prompt
from tinker_cookbook.server.openai.protocol import ApiError, CallPolicy, ChatBody

# What the hosted service, Anthropic's API and the bundled engine say of a prompt that is too long.
_TOO_LONG = re.compile(
    r"prompt length plus max_tokens exceeds|prompt tokens \+ \d+ max_tokens >|prompt is too long"
    r"|prompt: \d+ tokens[^;]* the model's context",
    re.IGNORECASE,
)
# Fields of our own server that the proxy does not have.
_UNSUPPORTED = set(ChatBody.model_fields) - {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens"),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "stop", "seed", "stream"),
    *("stream_options", "reasoning_effort"),  # how much a model thinks is up to the renderer
}


class SampledSequenceLike(Protocol):
    """What the proxy reads of a sampled sequence."""

    @property
    def tokens(self) -> Sequence[int]:
        """Sampled tokens, with the stop token."""
        ...

    @property
    def stop_reason(self) -> str | None:
        """``stop`` or ``length``."""
        ...


class SampleResponseLike(Protocol):
    """What the proxy reads of a response."""

    @property
    def sequences(self) -> Sequence[SampledSequenceLike]:
        """One sequence for each sample."""
        ...


class SamplingClientLike(Protocol):
    """What the proxy needs of a sampling client."""

    def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> Awaitable[SampleResponseLike]:
        """Samples completions of ``prompt``."""
        ...


class RendererLike(Protocol):
    """What the proxy needs of a renderer."""

    def get_stop_sequences(self) -> list[str] | list[int]:
        """Returns the strings or tokens that end a message."""
        ...

    def create_conversation_prefix_with_tools(
        self, tools: list[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Returns the messages that declare tools; raises NotImplementedError without support."""
        ...

    def build_generation_prompt(self, messages: list[Message]) -> tinker.ModelInput:
        """Returns the prompt of the next message."""
        ...

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """Returns the message of sampled tokens, and how it ended."""
        ...


@dataclass
class ProxyDeps:
    """What the proxy samples with."""

    renderer: RendererLike
    sampling_client: SamplingClientLike
    model_label: str
    """Name of the model in responses, whatever model a request names."""
    default_max_tokens: int = 1024
    """For requests without ``max_tokens``."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request, for either format."""

    message: Json
    """In OpenAI's format."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    prompt_tokens: int
    completion_tokens: int
    at_client_stop: bool = False
    """Whether a stop string of the request ended the text."""
    stop_sequence: str | None = None
    """That string, if it is known which one it was."""


@dataclass(frozen=True)
class _Sampling:
    prompt: tinker.ModelInput
    params: tinker.SamplingParams
    policy: CallPolicy
    client_stops: Sequence[str]


async def answer_request(
    deps: ProxyDeps, parse: Callable[[bytes], ChatBody], raw: bytes, address: Mapping[str, Any]
) -> tuple[ChatBody, Answer]:
    """Returns the request of the body ``raw`` and its answer.

    Raises ``ApiError`` and the package's errors for an invalid request, and the error of the
    sampling client.
    """
    # Threads, because rendering a long conversation takes longer than other requests should wait.
    body = await asyncio.to_thread(parse, raw)
    sampling = await asyncio.to_thread(_prepare, deps, body)
    # The requested model does not change which model samples, but the record has it.
    requested = {"requested_model": body.model} if body.model else {}
    scope: dict[str, ScopeValue] = {**requested, **address}
    with capture(**scope):
        try:
            response = await deps.sampling_client.sample(
                prompt=sampling.prompt, num_samples=1, sampling_params=sampling.params
            )
        except (tinker.BadRequestError, DataValidationError) as error:
            # Agents shorten their history after this message, and repeat a request after a 500.
            if not _TOO_LONG.search(str(error)):
                raise
            raise ApiError(
                f"prompt is too long: {sampling.prompt.length} tokens and max_tokens="
                f"{sampling.params.max_tokens} exceed the model's context; shorten the messages",
                param="messages",
                code="context_length_exceeded",
            ) from error
    return body, await asyncio.to_thread(_answer, deps, body, sampling, response.sequences[0])


def _prepare(deps: ProxyDeps, body: ChatBody) -> _Sampling:
    _check_fields(body)
    policy = CallPolicy.of(body)
    if policy.use == "required":
        raise ApiError(
            "tool_choice: this proxy cannot force a call; use auto or none", param="tool_choice"
        )
    tools = [] if body.tool_choice == "none" else body.tools or []
    try:
        prompt = chat_prompt(cast(Renderer, deps.renderer), body.messages, tools)
    except NotImplementedError as error:
        raise ApiError(
            "tools: the renderer of this proxy does not support tool calling; leave tools out",
            param="tools",
        ) from error
    strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stop: list[Any] = list(deps.renderer.get_stop_sequences())
    if "" in strings:
        raise ApiError(
            "stop (stop_sequences): got an empty string, which would end every answer", param="stop"
        )
    if strings and any(isinstance(one, int) for one in stop):
        raise ApiError(
            "stop (stop_sequences): the renderer uses token-id stop conditions, which cannot be "
            "combined with strings; leave the strings out",
            param="stop",
        )
    newer = body.max_completion_tokens
    max_tokens = body.max_tokens if newer is None else newer
    params = tinker.SamplingParams(
        max_tokens=max_tokens or deps.default_max_tokens,
        stop=[*stop, *strings],
        **body.model_dump(include={"temperature", "top_p", "top_k", "seed"}, exclude_none=True),
    )
    return _Sampling(prompt, params, policy, strings)


def _check_fields(body: ChatBody) -> None:
    for name in sorted(_UNSUPPORTED):
        value = getattr(body, name)
        if not value or (name in ("n", "repetition_penalty") and value == 1):
            continue  # it has no effect
        raise ApiError(
            f"{name}: this proxy does not support it; leave it out",
            param=name,
            code="unsupported_parameter",
        )


def _answer(
    deps: ProxyDeps, body: ChatBody, sampling: _Sampling, sequence: SampledSequenceLike
) -> Answer:
    tokens = list(sequence.tokens)
    parsed, ending = deps.renderer.parse_response(tokens)
    # A model that knows tools may write calls also where the prompt declares none.
    if body.tool_choice == "none":
        parsed.pop("tool_calls", None)
    message, _ = answer_of(parsed, sampling.policy)
    finish_reason = "tool_calls" if "tool_calls" in message else "stop"
    if sequence.stop_reason == "length":
        finish_reason = "length"
    at_stop, stop_sequence = False, None
    if finish_reason == "stop" and not ending.is_clean:
        text, stops = message["content"], sampling.client_stops
        found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            end, stop_sequence = min(found)
            message["content"], at_stop = text[:end], True
        # Some samplers leave the stop string out. Then it was the client's only if the renderer
        # has none.
        elif stops and len(stops) == len(sampling.params.stop or ()):
            at_stop, stop_sequence = True, stops[0] if len(stops) == 1 else None
    return Answer(
        message, finish_reason, sampling.prompt.length, len(tokens), at_stop, stop_sequence
    )
