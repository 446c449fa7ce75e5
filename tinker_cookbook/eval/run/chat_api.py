"""Samples answers from any server with the OpenAI chat API (vLLM, Ollama, api.openai.com)."""

from __future__ import annotations

from typing import Any, Self

from tinker_cookbook.eval.run.answers import key_of
from tinker_cookbook.eval.run.sources import (
    Answer,
    AnswerSource,
    Prompt,
    messages_text,
    sampling_description,
)
from tinker_cookbook.eval.run.types import BenchmarkConfig
from tinker_cookbook.grading.texts import split_thinking
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.row_images import has_images
from tinker_cookbook.third_party.openai_compat import tinker_messages_to_openai
from tinker_cookbook.utils.chat_api import ChatApi


class ChatApiSource(AnswerSource):
    """Sends messages to ``URL/chat/completions``; the server applies the chat format.

    Use it as an asynchronous context manager; entering it checks that the server has the model.
    """

    def __init__(
        self, url: str, model_name: str, api_key: str | None, config: BenchmarkConfig
    ) -> None:
        self._api = ChatApi(
            url,
            model_name,
            api_key,
            timeout_seconds=config.timeout_seconds,
            max_connections=config.concurrency,
        )
        self.url, self.model_name, self.config = self._api.url, model_name, config
        self.model_id = config.model_id or f"{self.url} {model_name}"

    async def __aenter__(self) -> Self:
        await self._api.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._api.close()

    def description(self) -> dict[str, Any]:
        """Returns the sampling settings; the chat format is the server's."""
        return {"renderer": "server", **sampling_description(self.config)}

    def render(self, messages: list[Message]) -> Prompt:
        """Returns the messages as JSON, images as data URLs."""
        if has_images(messages):
            value = tinker_messages_to_openai(messages)["messages"]
        else:
            value = [{"role": role, "content": text} for role, text in messages_text(messages)]
        return Prompt(key_of({"messages": value}), value, None)

    async def sample(self, prompt: Prompt, num_samples: int, seed: int | None) -> list[Answer]:
        """Requests all answers at once; if the server returns fewer, requests the rest again."""
        answers: list[Answer] = []
        while len(answers) < num_samples:
            missing = num_samples - len(answers)
            shifted = None if seed is None else seed + len(answers)
            config = self.config
            choices, tokens = await self._api.choices(
                prompt.value,
                self._limit(prompt),
                config.temperature,
                top_p=config.top_p,
                top_k=config.top_k if config.top_k > 0 else None,
                n=missing if missing > 1 else None,
                seed=shifted,
            )
            answers += [_answer(choice, tokens // len(choices)) for choice in choices[:missing]]
        return answers

    def _limit(self, prompt: Prompt) -> int:
        """Returns the maximum tokens of an answer; only the server knows those of the prompt."""
        context = self.config.context_window or self._api.max_model_len
        if context is None:
            return self.config.max_tokens
        # A text has fewer tokens than half its characters, so this never exceeds the context.
        characters = sum(len(message["content"]) for message in prompt.value)
        room = context - characters // 2 - 16 * (1 + len(prompt.value))
        return min(self.config.max_tokens, max(1, room))


def _answer(choice: dict[str, Any], tokens: int) -> Answer:
    message = choice.get("message") or {}
    content = message.get("content") or ""
    # vLLM, DeepSeek and others return thinking separately, under one of two names.
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    text, inline = split_thinking(content)
    truncated = choice.get("finish_reason") == "length"
    return Answer(text, tokens, truncated, str(thinking or inline))
