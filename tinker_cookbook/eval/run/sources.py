"""Sources of answers: a sampling client with a renderer, or a chat API."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.eval.run.types import BenchmarkConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.grading.texts import split_thinking
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    format_content_as_string,
    get_text_content,
)
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.utils.chat_api import ContextOverflowError
from tinker_cookbook.utils.imports import tinker


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    text: str
    """Text without thinking; this is graded."""
    num_tokens: int
    truncated: bool
    thinking: str = ""
    sampled: TokensWithLogprobs | None = None
    """Its tokens, if the source has them."""
    message: Message | None = None
    """The parsed answer."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that is ready to be sent."""

    key: str
    """Hash of the model's input."""
    value: Any
    num_tokens: int | None
    """Number of tokens; ``None`` if only the server knows it."""


class AnswerSource(ABC):
    """Samples answers to messages."""

    model_id: str
    """Identifies the weights: part of the key of stored answers."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Returns the settings of rendering and sampling, for the key."""

    @abstractmethod
    def render(self, messages: list[Message]) -> Prompt:
        """Returns the prompt; runs in a thread."""

    @abstractmethod
    async def sample(self, prompt: Prompt, num_samples: int, seed: int | None) -> list[Answer]:
        """Samples answers in one request.

        Raises:
            ContextOverflowError: the prompt fills the context.
        """


class RendererSource(AnswerSource):
    """A sampling client and the renderer of its chat format."""

    def __init__(
        self,
        client: SamplingClient,
        renderer: Renderer,
        config: BenchmarkConfig,
        model_id: str,
        context_window: int | None,
    ) -> None:
        self.client, self.renderer, self.config = client, renderer, config
        self.model_id, self.context_window = model_id, context_window

    @classmethod
    async def open(
        cls, client: SamplingClient, renderer: Renderer, config: BenchmarkConfig
    ) -> RendererSource:
        """Returns the source, with the model's identity and context window if they are not set."""
        model_id, context = config.model_id, config.context_window
        if model_id is None:
            # Without stored answers the identity is not needed, and reading the weights takes a
            # while.
            model_id = "" if config.save_dir is None else await identify(client)
        if context is None:
            context = await asyncio.to_thread(context_of, client)
        return cls(client, renderer, config, model_id, context)

    def description(self) -> dict[str, Any]:
        """Returns renderer and sampling settings."""
        return {
            "renderer": type(self.renderer).__name__,
            "stop": self.renderer.get_stop_sequences(),
            "context_window": self.context_window,
            **sampling_description(self.config),
        }

    def policy(self, seed: int | None) -> TinkerTokenCompleter:
        """Returns the policy with the settings of the config."""
        config = self.config
        return TinkerTokenCompleter(
            self.client,
            config.max_tokens,
            config.temperature,
            self.context_window,
            config.top_p,
            config.top_k,
            seed,
        )

    def render(self, messages: list[Message]) -> Prompt:
        """Returns the tokens of the prompt."""
        rendered = self.renderer.build_generation_prompt(messages)
        return Prompt(prompt_key(rendered), rendered, rendered.length)

    async def sample(self, prompt: Prompt, num_samples: int, seed: int | None) -> list[Answer]:
        """Samples all answers in one request, so that the prompt is prefilled once."""
        assert prompt.num_tokens is not None
        if self.context_window is not None and prompt.num_tokens >= self.context_window:
            raise ContextOverflowError(
                f"the prompt has {prompt.num_tokens} tokens, the context {self.context_window}"
            )
        sampled = await self.policy(seed).sample_many(
            prompt.value, self.renderer.get_stop_sequences(), num_samples
        )
        # Parsing decodes the tokens, which takes a while for long answers.
        return await asyncio.to_thread(lambda: [self.parse(answer) for answer in sampled])

    def parse(self, sampled: TokensWithLogprobs) -> Answer:
        """Parses sampled tokens into an answer."""
        message, _ = self.renderer.parse_response(sampled.tokens)
        content = message["content"]
        parts = [] if isinstance(content, str) else content
        thinking = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
        text = get_text_content(message)
        if not thinking:
            text, thinking = split_thinking(text)
        truncated = sampled.stop_reason == "length"
        return Answer(text, len(sampled.tokens), truncated, thinking, sampled, message)


def sampling_description(config: BenchmarkConfig) -> dict[str, Any]:
    """Returns the sampling settings that affect answers."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    return {name: getattr(config, name) for name in names}


def prompt_key(prompt: tinker.ModelInput) -> str:
    """Returns a hash of a rendered prompt."""
    try:
        content = np.asarray(prompt.to_ints(), dtype=np.int64).tobytes()
    except ValueError:  # images have no token ids
        content = prompt.model_dump_json().encode()
    return hashlib.sha256(content).hexdigest()[:16]


def example_seed(seed: int | None, example_id: str, first_sample: int) -> int | None:
    """Returns the seed of an example's request, independent of the selection of examples."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}/{example_id}/{first_sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # fits a signed 32-bit integer


async def identify(client: SamplingClient) -> str:
    """Returns an identifier of a client's weights, if available.

    The local engine has a hash of the adapter. Weights without an identifier get a new one
    each time, so that answers of other weights are never reused; set ``model_id`` to reuse them.
    """
    digest = getattr(client, "weights_digest", None)
    if digest is not None:
        return str(await asyncio.to_thread(digest))
    base = getattr(client, "get_base_model", lambda: "unknown")()
    path = getattr(client, "model_path", None)
    return f"{base} {path or uuid.uuid4().hex}"


def context_of(client: SamplingClient) -> int | None:
    """Returns the context window of a client's model, or None if it is not known."""
    from tinker_cookbook.model_info import resolve_max_length

    base = getattr(client, "get_base_model", None)
    try:
        return None if base is None else resolve_max_length(str(base()), None)
    except (ConfigurationError, OSError):
        return None


def messages_text(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Returns role and text of messages; images are named."""
    return [
        (
            message["role"],
            format_content_as_string(message["content"])
            if has_images([message])
            else get_text_content(message),
        )
        for message in messages
    ]
