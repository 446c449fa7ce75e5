"""Prompts of an episode that extend the sampled tokens."""

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
    """Renders the prompts of one episode from the conversation so far.

    A text has several tokenizations, and a tool call has several spellings; a
    model does not always sample the renderer's. A prompt rendered from the parsed answer
    then differs from the sampled tokens, and training would need a separate sequence per turn.
    So the rendered tokens up to the end of an answer are replaced by the earlier prompt and the
    sampled tokens. If the chat format rewrites history, for example drops thinking, the rendered
    prompt is used.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._last: list[int] | None = None
        # Rendered tokens up to the latest answer, and the tokens that replace them.
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
        # Images have no tokens to compare.
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
        """Returns the number of rendered tokens to replace by the sampled ones; None: do not
        replace."""
        if tokens[: len(sampled)] == sampled:
            return len(sampled)
        # 1. The same text with other tokens. Its length grows with the tokens, so bisect its end.
        decode = self._renderer.codec.decode
        text = decode(sampled)
        end = bisect_left(range(len(tokens)), len(text), key=lambda n: len(decode(tokens[:n])))
        if decode(tokens[:end]) == text:
            return end
        # 2. The same message in another spelling, such as a call without a space after a comma. The
        # template writes it the same at the end of a conversation and in history.
        try:
            example, weights = self._renderer.build_supervised_example(conversation)
        except RendererError:  # the format rewrites such an answer in history
            return None
        rendered = _text_tokens(example) or []
        trained = [i for i, weight in enumerate(weights.tolist()) if weight > 0]
        rendered = rendered[: trained[-1] + 1] if trained else []
        # An answer without an end has no corresponding part of the rendered conversation.
        complete = bool(rendered) and rendered[-1] == sampled[-1]
        return len(rendered) if complete and tokens[: len(rendered)] == rendered else None


def _text_tokens(prompt: tinker.ModelInput) -> list[int] | None:
    """Returns the tokens of a prompt without images."""
    if all(isinstance(chunk, tinker.EncodedTextChunk) for chunk in prompt.chunks):
        return prompt.to_ints()
    return None
