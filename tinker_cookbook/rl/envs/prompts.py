"""Prompts of an episode that extend the sampled tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.model_inputs import ChunkKeys


class EpisodePrompts:
    """Renders the prompts of one episode from the conversation so far.

    A text has several tokenizations, and a tool call has several spellings; a
    model does not always sample the renderer's. A prompt rendered from the parsed answer
    then differs from the sampled tokens, and training would need a separate sequence per turn.
    So the rendered tokens up to the end of an answer are replaced by the earlier prompt and the
    sampled tokens. Images are compared by their content. If the chat format rewrites history, for
    example drops thinking, the rendered prompt is used.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._keys = ChunkKeys()
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
        tokens = self._keys.keys(prompt).tolist()
        if answered is not None and self._last is not None:
            conversation, action = answered
            sampled = [*self._last, *action]
            end = self._end_of_answer(tokens, sampled, conversation)
            self._rendered, self._sampled = ([], []) if end is None else (tokens[:end], sampled)
        if self._sampled and tokens[: len(self._rendered)] == self._rendered:
            tokens = self._sampled + tokens[len(self._rendered) :]
            prompt = self._keys.model_input(np.asarray(tokens, dtype=np.int64))
        self._last = tokens
        return prompt

    def _end_of_answer(
        self, tokens: list[int], sampled: list[int], conversation: Sequence[Message]
    ) -> int | None:
        """Returns the number of rendered tokens to replace by the sampled ones; None: do not
        replace."""
        if tokens[: len(sampled)] == sampled:
            return len(sampled)
        # 1. The same text with other tokens. Its length grows with the tokens, so bisect its end. A
        #    renderer of another package may have no codec.
        codec = getattr(self._renderer, "codec", None)
        if codec is None:
            return None

        has_media = min(sampled) < 0

        def decode(keys: Sequence[int]) -> str:
            # Keys of images are negative and have no text.
            return codec.decode([key for key in keys if key >= 0] if has_media else keys)

        text = decode(sampled)
        end = bisect_left(range(len(tokens)), len(text), key=lambda n: len(decode(tokens[:n])))
        if decode(tokens[:end]) == text:
            return end
        # 2. The same message in another spelling, such as a call without a space after a comma. The
        #    template writes it the same at the end of a conversation and in history.
        *body, stop = self._rendered_answer(conversation) or [-1]
        if tokens[: len(body)] != body or len(tokens) == len(body):
            return None
        # An answer without an end has no corresponding part of the rendered conversation. A model
        # may end with another stop token than the renderer; one that begins the next message must
        # be the one of that message.
        last, following = sampled[-1], tokens[len(body)]
        ends = last == stop or last in self._renderer.get_stop_sequences()
        return len(body) + 1 if ends and following in {stop, last} else None

    def _rendered_answer(self, conversation: Sequence[Message]) -> list[int]:
        """Returns the tokens of a conversation up to the stop token of its last answer."""
        # all_tokens takes answers that the format writes, but does not train.
        extends = getattr(self._renderer, "has_extension_property", False)
        for what in ("last_assistant_message", *(["all_tokens"] if extends else [])):
            try:
                example, weights = self._renderer.build_supervised_example(conversation, what)
            except RendererError:  # the format rewrites such an answer in history
                continue
            rendered = self._keys.keys(example).tolist()
            trained = [i for i, weight in enumerate(weights.tolist()) if weight > 0]
            if what == "all_tokens":
                stops = self._renderer.get_stop_sequences()
                trained = [i for i in trained if rendered[i] in stops]
            return rendered[: trained[-1] + 1] if trained else []
        return []
