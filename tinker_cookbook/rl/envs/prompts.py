"""Prompts of an episode that begin with the tokens that were sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.imports import lazy_module

if TYPE_CHECKING:
    import tinker
else:
    tinker = lazy_module("tinker")


class EpisodePrompts:
    """Renders the prompts of one episode, each from the conversation so far.

    Text can be split into tokens in several ways, and a model does not always sample the one that
    the tokenizer chooses. A prompt rendered from the parsed answer then differs from the sampled
    tokens, and training would need a separate sequence for each turn. So where the text of a prompt
    begins with that of the prompt and the answer before it, the tokens up to there are the earlier
    prompt and the sampled tokens. Where the chat format rewrites history, such as by dropping
    thinking, the prompt stays as it is rendered.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._last: list[int] | None = None
        # Rendered tokens up to the newest answer, and the tokens that take their place.
        self._rendered: list[int] = []
        self._sampled: list[int] = []

    def build(self, messages: Sequence[Message], action: Sequence[int] | None) -> tinker.ModelInput:
        """Returns the next prompt; ``action`` has the tokens of an answer since the last one."""
        prompt = self._renderer.build_generation_prompt(messages)
        # Images have no tokens that could be compared.
        if not all(isinstance(chunk, tinker.EncodedTextChunk) for chunk in prompt.chunks):
            self._last = None
            return prompt
        tokens = prompt.to_ints()
        if action is not None and self._last is not None:
            self._add_answer(tokens, [*self._last, *action])
        if self._sampled and tokens[: len(self._rendered)] == self._rendered:
            tokens = self._sampled + tokens[len(self._rendered) :]
            prompt = tinker.ModelInput.from_ints(tokens)
        self._last = tokens
        return prompt

    def _add_answer(self, tokens: list[int], sampled: list[int]) -> None:
        """Finds which of the rendered tokens have the text of the sampled ones."""
        self._rendered, self._sampled = [], []
        end = len(sampled)
        if tokens[:end] != sampled:
            decode = self._renderer.codec.decode
            text = decode(sampled)
            # The text grows with the tokens, so its length is found by bisection.
            end = bisect_left(range(len(tokens)), len(text), key=lambda n: len(decode(tokens[:n])))
            if decode(tokens[:end]) != text:
                return
        self._rendered, self._sampled = tokens[:end], sampled
