"""Tokens in the colours of their weights, for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

_GREEN, _YELLOW, _RED, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def format_colorized(
    tokens: Sequence[int],
    weights: Sequence[float],
    tokenizer: Tokenizer,
    draw_newline_arrow: bool = False,
) -> str:
    """The text of ``tokens``, green where the weight is above 0, yellow at 0, red below.

    Neighbours of one colour are decoded together, so that characters of several tokens are whole.

    Args:
        tokens: Token ids [T].
        weights: Weights [T].
        tokenizer: Decodes them.
        draw_newline_arrow: Show ``↵`` in front of each line break.

    Raises:
        ValueError: The lengths differ.
    """
    if len(tokens) != len(weights):
        raise ValueError(
            f"weights: got {len(weights)}, expected {len(tokens)}, one for each of the tokens"
        )
    parts: list[str] = []
    for color, pairs in groupby(zip(tokens, weights, strict=True), key=lambda p: _color(p[1])):
        text = str(tokenizer.decode([token for token, _ in pairs]))
        # A line of its own for each escape: pagers drop colours at line breaks.
        for line in text.splitlines(keepends=True):
            shown = line.replace("\n", "↵\n") if draw_newline_arrow else line
            parts.append(f"{color}{shown}{_RESET}")
    return "".join(parts)


def _color(weight: float) -> str:
    if weight == 0:
        return _YELLOW
    return _GREEN if weight > 0 else _RED
