"""Hidden states of sequences that are scored, computed like the prefill of the sampler.

The result of a token does not depend, to the bit, on other sequences of the batch nor on how a
sequence is split into steps. Scores are therefore the same for any batching of requests, and in a
resumed run. Common prefixes are computed once (``prefix_tree``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.low_rank import Segments, Terms, filling
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout, reading
from tinker_cookbook.engine.sampling.kv_cache import KVCache, KVSlot, LayerShape
from tinker_cookbook.engine.sampling.paged_cache import cache_for
from tinker_cookbook.engine.training.prefix_tree import lay_out

STEP_TOKENS = 512
"""Tokens of a forward pass. More would not make the products faster and would delay other requests.
"""


@dataclass(eq=False)
class _Stretch:
    """Segment of the prefix tree: tokens at ``places`` of the row, which continue ``path``, in
    ``slot``."""

    path: np.ndarray
    places: np.ndarray
    slot: KVSlot | None = None

    @property
    def read(self) -> int:
        """Number of tokens computed so far."""
        return 0 if self.slot is None else self.slot.length - len(self.path)


@torch.no_grad()
def read_together(
    base: BaseModel,
    shapes: list[LayerShape],
    terms: Terms,
    sequences: Sequence[np.ndarray],
    pause: Callable[[], None],
) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Returns the last hidden states [S, H] and the indices of each sequence's tokens in them.

    Each sequence has at least one token. ``shapes`` are the base model's ``kv_shapes``; ``pause``
    is called between forward passes.
    """
    row = lay_out(sequences)
    cache = cache_for(shapes, base.dtype, base.device, base.context_length)
    waiting = [
        _Stretch(siblings.path, places) for siblings in row.siblings for places in siblings.places
    ]
    ends: dict[int, KVSlot] = {}  # by the place at which what a slot holds ends
    hidden: torch.Tensor | None = None
    while waiting:
        step = _next_step(waiting, ends, cache)
        places = np.concatenate([stretch.places[done : done + n] for stretch, done, n in step])
        found = _forward(base, terms, step, row.tokens[places], row.positions[places])
        if hidden is None:
            hidden = found.new_empty(len(row.tokens), found.shape[-1])
        hidden[torch.from_numpy(places).to(base.device)] = found[: len(places)]
        for stretch, _, count in step:
            assert stretch.slot is not None
            stretch.slot.length += count
            if stretch.read == len(stretch.places):
                ends[int(stretch.places[-1])] = stretch.slot
        waiting = [stretch for stretch in waiting if stretch.read < len(stretch.places)]
        if waiting:
            pause()
    assert hidden is not None
    return hidden, row.where


_Step = list[tuple[_Stretch, int, int]]
"""(segment, tokens computed before, tokens of this step)."""


def _next_step(waiting: Sequence[_Stretch], ends: dict[int, KVSlot], cache: KVCache) -> _Step:
    """Returns segments for one pass whose parents are complete, up to the token limit."""
    out: _Step = []
    room = STEP_TOKENS
    for stretch in waiting:
        if not room:
            break
        if stretch.slot is None:
            before, length = len(stretch.path), len(stretch.path) + len(stretch.places)
            if not before:
                stretch.slot = cache.new(length)
            elif (parent := ends.get(int(stretch.path[-1]))) is not None:
                stretch.slot = cache.copy(parent, before, length)
            else:
                continue
        count = min(room, len(stretch.places) - stretch.read)
        out.append((stretch, stretch.read, count))
        room -= count
    return out


def _forward(
    base: BaseModel, terms: Terms, step: _Step, tokens: np.ndarray, positions: np.ndarray
) -> torch.Tensor:
    """Returns hidden states of a step's tokens and of the padding."""
    parts, first = [], 0
    for stretch, _, count in step:
        assert stretch.slot is not None
        parts.append(reading(stretch.slot, first, count))
        first += count
    fill = (0, -first % 32 if base.ragged else filling(first))
    tokens, positions = np.pad(tokens, fill), np.pad(positions, fill)
    return base.hidden_of_batch(
        torch.from_numpy(tokens).to(base.device),
        torch.from_numpy(positions).to(base.device),
        BatchLayout(parts),
        Segments.of_one(terms),
    )
