"""Incremental detokenization with stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.parsing import Utf8TokenDecoder, partial_at_end

# Ids and log-probabilities [k] of the most probable tokens.
TopLogprobs: TypeAlias = "tuple[np.ndarray, np.ndarray]"


@dataclass(frozen=True)
class SampledToken:
    """Token with its log-probability (None for the first token of a prompt)."""

    token: int
    logprob: float | None
    top: TopLogprobs | None = None
    offset: int = 0
    """Character at which the token's text starts."""


class IncrementalDetokenizer:
    """Detokenizer of a stream of tokens.

    It holds back characters that span tokens, and text that may be the start of a stop string, so
    that the concatenated text does not depend on how tokens are split into calls.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop_tokens: Collection[int],
        stop_strings: Sequence[str],
        min_tokens: int = 0,
        all_tokens: bool = False,
    ) -> None:
        """``all_tokens``: ``take_tokens`` also returns stop tokens and tokens of stop strings."""
        self._decoder = Utf8TokenDecoder(codec)
        self._stop_tokens, self._stop_strings = stop_tokens, tuple(stop_strings)
        self._held_text = ""  # decoded, but possibly the start of a stop string
        self._all_tokens = all_tokens
        self._unstopped = min_tokens  # number of first tokens without stop strings
        self._num_chars = 0  # characters returned
        self._held_tokens: list[SampledToken] = []
        self._ready_tokens: list[SampledToken] = []
        self.stopped = False

    def add(self, tokens: Sequence[SampledToken]) -> str:
        """Adds tokens; returns the text that can no longer change."""
        text = ""
        for token in tokens:
            if self.stopped:
                break
            if token.token in self._stop_tokens:
                # A stop token has no text and no text follows it, so held text is final.
                text += self.finish()
                self.stopped = True
                if self._all_tokens:
                    self._ready_tokens.append(replace(token, offset=self._num_chars))
                break
            # The offset includes held text, which precedes this token.
            offset = self._num_chars + len(self._held_text)
            self._held_tokens.append(replace(token, offset=offset))
            piece = self._decoder.decode([token.token])
            self._unstopped -= 1
            text += self._add_text(piece) if piece else ""
        if self.stopped and self._all_tokens:
            self._ready_tokens += self._held_tokens
            self._held_tokens = []
        return text

    def finish(self) -> str:
        """Returns the rest after the last token; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._add_text(self._decoder.flush())
        if not self.stopped or self._all_tokens:
            text, self._held_text = text + self._held_text, ""
            self._num_chars += len(text)
            self._ready_tokens += self._held_tokens
            self._held_tokens = []
        return text

    def take_tokens(self) -> list[SampledToken]:
        """Returns the tokens of the text that was returned since the last call."""
        ready, self._ready_tokens = self._ready_tokens, []
        return ready

    def _add_text(self, text: str) -> str:
        text = self._held_text + text
        # End the text at the first stop string, and hold back a possible start of one.
        stops = self._stop_strings if self._unstopped < 0 else ()
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, cut = True, min(found)
            self._held_text = ""
        else:
            cut = len(text) - partial_at_end(text, stops)
            self._held_text = text[cut:]
        self._num_chars += cut
        # Return tokens together with the text in which they start, never earlier.
        while self._held_tokens and self._held_tokens[0].offset < self._num_chars:
            self._ready_tokens.append(self._held_tokens.pop(0))
        return text[:cut]
