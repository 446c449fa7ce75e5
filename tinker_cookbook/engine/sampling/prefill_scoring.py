"""Computes hidden states of scored sequences like the sampler's prefill.

A token's result is bit-identical, whatever the other sequences of the batch and however a
sequence is split into steps. Scores are therefore the same for any batching of requests, and in a
resumed run. Common prefixes are computed once (``prefix_tree``) and shared as blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.low_rank import Segments, Terms
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout
from tinker_cookbook.engine.sampling.paged_cache import (
    BlockTable,
    LayerShape,
    PagedCache,
    TokenSpan,
)
from tinker_cookbook.engine.training.prefix_tree import lay_out, with_images
from tinker_cookbook.engine.vision.images import whole_images

STEP_TOKENS = 512
"""Maximum tokens of a forward pass. More would not be more efficient and would delay other
requests.
"""


@dataclass(eq=False)
class _Segment:
    """Segment of the prefix tree: tokens at ``indices`` of the row, which continue ``path``.

    It has no table until the segment before it is complete.
    """

    path: np.ndarray
    indices: np.ndarray
    table: BlockTable | None = None


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
    # A tree of segments: a common prefix is one segment, whose blocks its continuations share.
    row = with_images(lay_out(sequences), sequences, base.vision)
    cache = PagedCache(shapes, base.dtype, base.device)
    waiting = [_Segment(some.path, indices) for some in row.siblings for indices in some.segments]
    complete: dict[int, BlockTable] = {}  # by the last index of the segment
    hidden: torch.Tensor | None = None
    while waiting:
        runs, parts = _next_runs(waiting, complete, cache, row.last_seen)
        indices = np.concatenate(parts)
        fill = (0, base.filling(len(indices)))
        found = base.hidden_of_batch(
            torch.from_numpy(np.pad(row.tokens[indices], fill)).to(base.device),
            torch.from_numpy(row.positions[..., np.pad(indices, fill)]).to(base.device),
            BatchLayout(runs),
            Segments.of_one(terms),
        )
        if hidden is None:
            hidden = found.new_empty(len(row.tokens), found.shape[-1])
        hidden[torch.from_numpy(indices).to(base.device)] = found[: len(indices)]
        for run in runs:
            run.table.length += run.count
        # A complete segment is the prefix that others wait for.
        left = []
        for segment in waiting:
            table = segment.table
            if table is not None and table.length == len(segment.path) + len(segment.indices):
                complete[int(segment.indices[-1])] = table
            else:
                left.append(segment)
        waiting = left
        if waiting:  # let the sampler run between two passes
            pause()
    assert hidden is not None
    return hidden, row.where


def _next_runs(
    waiting: Sequence[_Segment],
    complete: dict[int, BlockTable],
    cache: PagedCache,
    last_seen: np.ndarray | None,
) -> tuple[list[TokenSpan], list[np.ndarray]]:
    """Returns runs of segments whose prefix is complete, up to the limit of a pass, and the indices
    of their tokens."""
    runs: list[TokenSpan] = []
    parts: list[np.ndarray] = []
    count = 0
    for segment in waiting:
        if count >= STEP_TOKENS:
            break
        before, length = len(segment.path), len(segment.path) + len(segment.indices)
        if segment.table is None:
            if not before:
                segment.table = cache.new(length)
            elif (prefix := complete.get(int(segment.path[-1]))) is not None:
                (segment.table,) = cache.fork(prefix, before)
                cache.grow(segment.table, length)
            else:
                continue
        done = segment.table.length - before
        room = min(STEP_TOKENS - count, len(segment.indices) - done)
        seen = None if last_seen is None else last_seen[segment.indices]
        room = whole_images(None if seen is None else seen - before, done, room)
        part = segment.indices[done : done + room]
        seen = None if seen is None else seen[done : done + room]
        runs.append(TokenSpan(segment.table, before + done, count, len(part), last_seen=seen))
        parts.append(part)
        count += len(part)
    return runs, parts
