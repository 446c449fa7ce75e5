"""Tokens as a person reads them: the text of each, and signs for what has no shape."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.display import special_ids
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.renderers.core.codec import TextCodec
from tinker_cookbook.renderers.core.pieces import Piece, flat, length

LINE_BREAK = "⏎"
UNFINISHED = "⋯"
"""Sign of a token that is a part of a character and not its last."""
_SIGNS = {" ": "·", "\n": LINE_BREAK, "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_UNREADABLE = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"))
_COMBINING = frozenset(("Mn", "Me"))
_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character
_MOST = 8  # tokens that are held back as parts of one character


@dataclass(frozen=True)
class ShownToken:
    """One token of a conversation, or an image (``id`` is None)."""

    id: int | None
    text: str
    """Its part of the decoded text; empty where a later token completes the character."""
    weight: float = 0.0
    control: bool = False
    """Whether it is no text: a token that is known by its name."""

    @property
    def trained(self) -> bool:
        """Whether the model is trained to say it."""
        return self.weight != 0


class TokenReader:
    """Makes what is shown from what a renderer gives."""

    def __init__(self, renderer: Renderer) -> None:
        self._codec = renderer.codec
        self._control = special_ids(renderer.tokenizer)

    def read(
        self, pieces: Sequence[Piece], weights: Sequence[float] | None = None
    ) -> list[ShownToken]:
        """Returns the tokens and media of ``pieces``; ``weights`` has one value a position."""
        items = flat(pieces)
        texts = iter(split_text(self._codec, [item for item in items if isinstance(item, int)]))
        shown: list[ShownToken] = []
        place = 0
        for item in items:
            weight = float(weights[place]) if weights is not None else 0.0
            if isinstance(item, int):
                shown.append(ShownToken(item, next(texts), weight, item in self._control))
                place += 1
            else:
                size = length(item)
                shown.append(ShownToken(None, f"[{_kind(item)}: {size} tokens]", weight, True))
                place += size
        return shown


def split_text(codec: TextCodec, tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token; joined, they are the text of all of them.

    Of the tokens that share a character the last one has it.
    """
    texts = [""] * len(tokens)
    real = codec.encode(_REPLACEMENT)
    start, waiting = 0, ""
    for i in range(len(tokens)):
        run = list(tokens[start : i + 1])
        text = codec.decode(run)
        if text.endswith(_REPLACEMENT) and run != real and len(run) < _MOST:
            waiting = text
            continue
        if waiting and text.startswith(waiting):  # it was never completed: bytes that are no text
            texts[i - 1], texts[i] = waiting, text[len(waiting) :]
        elif len(run) > 1:
            certain = codec.decode(run[:1]).rstrip(_REPLACEMENT)
            certain = certain if text.startswith(certain) else ""
            texts[start], texts[i] = certain, text[len(certain) :]
        else:
            texts[i] = text
        start, waiting = i + 1, ""
    if waiting:
        texts[-1] = waiting
    return texts


def signs(text: str) -> Iterator[tuple[str, str]]:
    """Yields each character with the sign that stands for it, ``""`` where it shows itself."""
    for i, character in enumerate(text):
        category = unicodedata.category(character)
        if character in _SIGNS:
            yield character, _SIGNS[character]
        elif category in _UNREADABLE:
            yield character, f"‹U+{ord(character):04X}›"
        elif i == 0 and category in _COMBINING:
            yield character, f"◌{character}"  # else it would sit on the border of the token
        else:
            yield character, ""


def readable(text: str) -> str:
    """Returns ``text`` for a person, without characters that would steer a terminal or a page."""
    return "".join(sign if sign[:1] == "‹" else character for character, sign in signs(text))


def first_difference(first: Sequence[Any], second: Sequence[Any]) -> int | None:
    """Returns the first place where two sequences differ, None where they are equal."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return None if len(first) == len(second) else min(len(first), len(second))


def _kind(medium: Any) -> str:
    return "audio" if "audio" in str(getattr(medium, "type", "image")) else "image"
