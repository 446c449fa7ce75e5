"""Text of sampled tokens: whole characters only, and nothing of what ends an answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.parsing import Utf8TokenDecoder, partial_at_end

Top: TypeAlias = "tuple[np.ndarray, np.ndarray]"
"""Ids and log-probabilities [k] of the most probable tokens."""

_BROKEN = "\ufffd"


@dataclass(frozen=True)
class SampledToken:
    """A token, its log-probability (None: it is a prompt's first), and what else was probable."""

    token: int
    logprob: float | None
    top: Top | None = None


@dataclass(frozen=True)
class Placed:
    """A token and where its text begins in the answer, in characters."""

    drawn: SampledToken
    offset: int


class DrawnText:
    """The text of one answer, from tokens as they come.

    A character that spans tokens, and text that may be the beginning of a stop string, wait until
    they are certain, so that pieces put together are the answer however the tokens were cut.
    """

    def __init__(
        self, codec: TextCodec, stop_tokens: Collection[int], stop_strings: Sequence[str]
    ) -> None:
        self._decoder = Utf8TokenDecoder(codec)
        self._stop_tokens, self._stop_strings = stop_tokens, tuple(stop_strings)
        self._held = ""  # decoded, but maybe a stop string
        self._given = 0  # characters given out
        self._waiting: list[Placed] = []
        self._ready: list[Placed] = []
        self.stopped = False

    def add(self, drawn: Sequence[SampledToken]) -> str:
        """Takes tokens; returns the text that has become certain."""
        piece = ""
        for one in drawn:
            if self.stopped:
                break
            if one.token in self._stop_tokens:
                piece += self._end()
                self.stopped = True
                break
            self._waiting.append(Placed(one, self._given + len(self._held)))
            text = self._decoder.decode([one.token])
            piece += self._take(text) if text else ""
        return piece

    def finish(self) -> str:
        """The rest, once no token follows; half a character becomes U+FFFD."""
        return "" if self.stopped else self._end()

    def placed(self) -> list[Placed]:
        """The tokens of the text given out since this was last asked for."""
        ready, self._ready = self._ready, []
        return ready

    def _end(self) -> str:
        piece = self._take(self._decoder.flush())
        if not self.stopped:
            piece, self._held = piece + self._held, ""
            self._given += len(piece)
            self._release(whole=True)
        return piece

    def _take(self, text: str) -> str:
        text = self._held + text
        found = [at for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, ready, self._held = True, text[: min(found)], ""
        else:
            cut = len(text) - partial_at_end(text, self._stop_strings)
            ready, self._held = text[:cut], text[cut:]
        self._given += len(ready)
        self._release(whole=False)
        return ready

    def _release(self, whole: bool) -> None:
        count = 0
        while count < len(self._waiting) and (whole or self._waiting[count].offset < self._given):
            count += 1
        self._ready += self._waiting[:count]
        del self._waiting[:count]


def token_name(codec: TextCodec, token: int) -> str:
    """The text of one token, or ``bytes:\\x…`` where it is part of a character."""
    text = codec.decode([token])
    if _BROKEN not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes(codec, token))


def token_bytes(codec: TextCodec, token: int) -> list[int]:
    """The bytes of one token in UTF-8, those of parts of characters too."""
    text = codec.decode([token])
    if _BROKEN not in text:
        return list(text.encode())
    name = str(codec.tokenizer.convert_ids_to_tokens(token))
    if codec.trailing_bytes([token]):
        return [int(name[3:5], 16)]
    letters = _byte_of_letter()
    if all(letter in letters for letter in name):
        return [letters[letter] for letter in name]
    return list(text.encode())


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """The bytes that byte-level vocabularies spell as letters: printable ones as themselves, the
    others in order as those from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(rest)}
