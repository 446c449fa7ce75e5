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
    stop_sequence: str | None = None
    """The stop string of the request that ended the text."""


async def answer_request(
    deps: ProxyDeps, parse: Callable[[bytes], ChatBody], raw: bytes, address: Mapping[str, Any]
) -> tuple[ChatBody, Answer]:
    """Returns the request of the body ``raw`` and its answer.

    Raises ``ApiError`` and the package's errors for an invalid request, and the error of the
    sampling client.
    """
    # Threads, because rendering a long conversation takes longer than other requests should wait.
    body = await asyncio.to_thread(parse, raw)
    prompt, params = await asyncio.to_thread(_prepare, deps, body)
    # The requested model does not change which model samples, but the record has it.
    requested = {"requested_model": body.model} if body.model else {}
    scope: dict[str, ScopeValue] = {**requested, **address}
    with capture(**scope):
        try:
            response = await deps.sampling_client.sample(
                prompt=prompt, num_samples=1, sampling_params=params
            )
        except (tinker.BadRequestError, DataValidationError) as error:
            # Agents shorten their history after this message, and repeat a request after a 500.
            if not _TOO_LONG.search(str(error)):
                raise
            raise ApiError(
                f"prompt is too long: {prompt.length} tokens and max_tokens={params.max_tokens} "
                "exceed the model's context; shorten the messages",
                param="messages",
                code="context_length_exceeded",
            ) from error
    (sequence,) = response.sequences
    return body, await asyncio.to_thread(_answer, deps, body, prompt.length, sequence)


def _prepare(deps: ProxyDeps, body: ChatBody) -> tuple[tinker.ModelInput, tinker.SamplingParams]:
    for name in sorted(_UNSUPPORTED):
        value = getattr(body, name)
        # A penalty of 1 and one sample have no effect.
        if value and not (name in ("n", "repetition_penalty") and value == 1):
            problem = f"{name}: this proxy does not support it; leave it out"
            raise ApiError(problem, param=name, code="unsupported_parameter")
    if CallPolicy.of(body).use == "required":
        raise ApiError(
            "tool_choice: this proxy cannot force a call; use auto or none", param="tool_choice"
        )
    tools = [] if body.tool_choice == "none" else body.tools or []
    try:
        prompt = chat_prompt(cast(Renderer, deps.renderer), body.messages, tools)
    except NotImplementedError as error:
        problem = "tools: the renderer of this proxy does not support tool calling; leave tools out"
        raise ApiError(problem, param="tools") from error
    stop: list[Any] = list(deps.renderer.get_stop_sequences())
    strings = _stop_strings(body)
    if "" in strings or (strings and any(isinstance(one, int) for one in stop)):
        raise ApiError(
            "stop (stop_sequences): empty strings, and strings with a renderer whose stop "
            "conditions are token ids, are not supported; leave them out",
            param="stop",
        )
    newer = body.max_completion_tokens
    max_tokens = body.max_tokens if newer is None else newer
    params = tinker.SamplingParams(
        max_tokens=max_tokens or deps.default_max_tokens,
        stop=[*stop, *strings],
        **body.model_dump(include={"temperature", "top_p", "top_k", "seed"}, exclude_none=True),
    )
    return prompt, params


def _stop_strings(body: ChatBody) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def _answer(
    deps: ProxyDeps, body: ChatBody, prompt_tokens: int, sequence: SampledSequenceLike
) -> Answer:
    tokens = list(sequence.tokens)
    parsed, ending = deps.renderer.parse_response(tokens)
    # A model that knows tools may write calls also where the prompt declares none.
    if body.tool_choice == "none":
        parsed.pop("tool_calls", None)
    message, _ = answer_of(parsed, CallPolicy.of(body))
    finish_reason = "tool_calls" if "tool_calls" in message else "stop"
    if sequence.stop_reason == "length":
        finish_reason = "length"
    stop_sequence = None
    if finish_reason == "stop" and not ending.is_clean:
        text = message["content"]
        found = [(at, stop) for stop in _stop_strings(body) if (at := text.find(stop)) >= 0]
        if found:
            end, stop_sequence = min(found)
            message["content"] = text[:end]
    return Answer(message, finish_reason, prompt_tokens, len(tokens), stop_sequence)
