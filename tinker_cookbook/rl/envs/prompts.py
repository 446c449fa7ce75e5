"""Prompts of an episode that begin with the tokens that were sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
else:
    tinker = lazy_module("tinker")


class EpisodePrompts:
    """Renders the prompts of one episode, each from the conversation so far.

    Text can be split into tokens in several ways, and a call can be spelled in several ways; a
    model does not always sample those of the renderer. A prompt rendered from the parsed answer
    then differs from the sampled tokens, and training would need a separate sequence for each turn.
    So the rendered tokens up to the end of an answer are replaced by the earlier prompt and the
    sampled tokens. Where the chat format rewrites history, such as by dropping thinking, the prompt
    stays as it is rendered.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._last: list[int] | None = None
        # Rendered tokens up to the newest answer, and the tokens that take their place.
        self._rendered: list[int] = []
        self._sampled: list[int] = []

    def build(
        self, messages: Sequence[Message], answered: tuple[Sequence[Message], Sequence[int]] | None
    ) -> tinker.ModelInput:
        """Returns the next prompt.

        Args:
            messages: The conversation.
            answered: After an answer: the conversation up to the answer, and its tokens.
        """
        prompt = self._renderer.build_generation_prompt(messages)
        tokens = _text_tokens(prompt)
        # Images have no tokens that could be compared.
        if tokens is None:
            self._last = None
            return prompt
        if answered is not None and self._last is not None:
            conversation, action = answered
            sampled = [*self._last, *action]
            end = self._end_of_answer(tokens, sampled, conversation)
            self._rendered, self._sampled = ([], []) if end is None else (tokens[:end], sampled)
        if self._sampled and tokens[: len(self._rendered)] == self._rendered:
            tokens = self._sampled + tokens[len(self._rendered) :]
            prompt = tinker.ModelInput.from_ints(tokens)
        self._last = tokens
        return prompt

    def _end_of_answer(
        self, tokens: list[int], sampled: list[int], conversation: Sequence[Message]
    ) -> int | None:
        """Returns how many of the rendered tokens the sampled ones replace, if they may."""
        if tokens[: len(sampled)] == sampled:
            return len(sampled)
        # 1. The same text in other tokens. It grows with the tokens, so its end is bisected.
        decode = self._renderer.codec.decode
        text = decode(sampled)
        end = bisect_left(range(len(tokens)), len(text), key=lambda n: len(decode(tokens[:n])))
        if decode(tokens[:end]) == text:
            return end
        # 2. The same message in another spelling, such as a call without a space after a comma. The
        # template writes it the same at the end of a conversation and in history.
        try:
            example, weights = self._renderer.build_supervised_example(conversation)
        except RendererError:  # a format that rewrites such an answer in history refuses it
            return None
        rendered = _text_tokens(example) or []
        trained = [i for i, weight in enumerate(weights.tolist()) if weight > 0]
        rendered = rendered[: trained[-1] + 1] if trained else []
        # An answer without its end has no place in the conversation that it could take.
        complete = bool(rendered) and rendered[-1] == sampled[-1]
        return len(rendered) if complete and tokens[: len(rendered)] == rendered else None


def _text_tokens(prompt: tinker.ModelInput) -> list[int] | None:
    """Returns the tokens of a prompt without images."""
    if all(isinstance(chunk, tinker.EncodedTextChunk) for chunk in prompt.chunks):
        return prompt.to_ints()
    return None
