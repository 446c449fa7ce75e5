"""What a view consists of: statements, with tokens under them, and examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers.core.pieces import Piece
from tinker_cookbook.renderers.show.tokens import ShownToken, TokenReader, first_difference

_BEFORE, _AFTER = 4, 8  # tokens shown around a difference


@dataclass(frozen=True)
class TokenRow:
    """A few tokens under a statement, ``…`` at either end where there are more."""

    label: str
    tokens: Sequence[ShownToken]
    cut_before: bool = False
    cut_after: bool = False


@dataclass(frozen=True)
class Fact:
    """One statement; ``good`` is None where it is neither right nor wrong."""

    label: str
    text: str
    good: bool | None = None
    rows: Sequence[TokenRow] = ()


@dataclass(frozen=True)
class ExampleView:
    """One training example, and what was found of its answers."""

    title: str
    tokens: Sequence[ShownToken]
    facts: Sequence[Fact]


@dataclass(frozen=True)
class View:
    """All that is shown."""

    facts: Sequence[Fact]
    examples: Sequence[ExampleView]


def side_by_side(reader: TokenReader, *sides: tuple[str, list[Any]]) -> list[TokenRow]:
    """Returns the tokens around the first place where two lists differ, a row a side."""
    at = first_difference(sides[0][1], sides[1][1]) or 0
    start, stop = max(0, at - _BEFORE), at + _AFTER
    rows: list[TokenRow] = []
    for label, items in sides:
        # A few more are read than shown: they may complete a character.
        tokens = reader.read(as_pieces(items[: stop + _BEFORE]))
        rows.append(TokenRow(label, tokens[start:stop], start > 0, len(items) > stop))
    return rows


def as_pieces(items: Sequence[Any]) -> list[Piece]:
    """Returns a flat list of tokens and media as pieces."""
    return [[item] if isinstance(item, int) else item for item in items]


def count(number: int, word: str) -> str:
    """Returns ``1 token``, ``2 tokens``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"
