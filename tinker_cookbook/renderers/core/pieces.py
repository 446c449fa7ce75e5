"""Pieces of a rendered conversation (runs of tokens, images, audio) and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from tinker_cookbook._process import torch_is_left_out
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    import tinker
    import torch
else:
    tinker = lazy_module("tinker")
    torch = lazy_module("torch")

Piece: TypeAlias = "Sequence[int] | tinker.types.ModelInputChunk"
"""A run of tokens, or a chunk of the SDK (an image)."""


def _is_tokens(piece: Piece) -> bool:
    return isinstance(piece, (list, tuple)) or hasattr(piece, "tokens")


def as_chunk(piece: Piece) -> Any:
    """Returns a run of tokens as a chunk of the SDK; a chunk is returned as it is."""
    if not isinstance(piece, (list, tuple)):
        return piece
    # Token ids come from a tokenizer: checking each of them again would cost as much as encoding.
    return tinker.EncodedTextChunk.model_construct(tokens=list(piece))


def token_list(piece: Piece) -> list[int]:
    """Returns the tokens of a piece that is no medium."""
    return list(_tokens(piece))


def _tokens(piece: Piece) -> Sequence[int]:
    if isinstance(piece, (list, tuple)):
        return piece
    return cast(Sequence[int], getattr(piece, "tokens", piece))


def length(piece: Piece) -> int:
    """Returns the number of context positions that a piece occupies."""
    if isinstance(piece, (list, tuple)):
        return len(piece)
    return getattr(piece, "length", None) or len(_tokens(piece))


def flat(pieces: Sequence[Piece]) -> list[Any]:
    """Returns tokens and media of ``pieces`` in one list, for comparison."""
    out: list[Any] = []
    for piece in pieces:
        out.extend(_tokens(piece) if _is_tokens(piece) else [piece])
    return out


def first_difference(first: Sequence[Any], second: Sequence[Any]) -> int | None:
    """Returns the first place where two sequences differ, None where they are equal."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return None if len(first) == len(second) else min(len(first), len(second))


def join_pieces(pieces: Sequence[Piece]) -> tinker.ModelInput:
    """Joins runs of tokens to one chunk each; media keep chunks of their own."""
    chunks: list[Any] = []
    run: list[int] = []
    for piece in pieces:
        if _is_tokens(piece):
            run.extend(_tokens(piece))
            continue
        if run:
            chunks.append(tinker.EncodedTextChunk(tokens=run))
        chunks.append(piece)
        run = []
    if run:
        chunks.append(tinker.EncodedTextChunk(tokens=run))
    return tinker.ModelInput(chunks=chunks)


def spread_weights(weighted: Sequence[tuple[Piece, float]]) -> torch.Tensor:
    """Spreads the weight of each piece over its tokens; media are never trained on.

    A numpy array in a process that torch was left out of (``backends.light``).
    """
    values = [weight if _is_tokens(piece) else 0.0 for piece, weight in weighted]
    lengths = [length(piece) for piece, _ in weighted]
    spread = np.repeat(np.array(values, dtype=np.float32), lengths)
    return cast("Any", spread) if torch_is_left_out() else torch.from_numpy(spread)


def join_weighted(
    weighted: Sequence[tuple[Piece, float]],
) -> tuple[tinker.ModelInput, torch.Tensor]:
    """Joins pieces to a model input of T tokens and float32 weights [T]."""
    return join_pieces([piece for piece, _ in weighted]), spread_weights(weighted)
