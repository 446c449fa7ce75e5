"""Whether a model can sample many sequences in one batch: tried once, on a few tokens.

Batching replaces attention and keeps keys and values by itself, so every layer must be attention
of a known kind. A model with recurrent layers, or one whose sliding windows come as a mask alone,
is sampled one request at a time instead, through transformers' own cache.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from tinker_cookbook.engine.batch_attention import (
    AttentionCall,
    BatchLayout,
    DecodeRows,
    PrefillRow,
    register,
)
from tinker_cookbook.engine.kv_cache import KVCache, LayerShape

if TYPE_CHECKING:
    from tinker_cookbook.engine.base_model import BaseModel

logger = logging.getLogger(__name__)


class _Probe:
    """Stands in for a sequence and notes what each layer would store."""

    first = 0

    def __init__(self, count: int) -> None:
        self.count = count
        self.shapes: dict[int, LayerShape] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])

    def attend(self, layer: int, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], self.shapes[layer].value)


@torch.no_grad()
def batch_trial(base: BaseModel) -> list[LayerShape] | None:
    """The shapes of the layers' keys and values, or ``None`` where the trial fails."""
    register()
    try:
        shapes = _shapes(base)
        if shapes is not None and _agrees(base, shapes):
            return shapes
        reason = "its layers keep more than keys and values"
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error)
    logger.info("%s: requests are sampled one by one: %s", base.name, reason)
    return None


def _shapes(base: BaseModel) -> list[LayerShape] | None:
    """Of all layers, in order; ``None`` if some is no attention or hides its window in a mask."""
    probe = _Probe(2)
    layout = BatchLayout([probe])  # type: ignore[list-item]
    tokens = torch.arange(2, device=base.device)
    base.hidden_of_batch(tokens, tokens, layout, [])
    config = getattr(base.config, "text_config", base.config)
    count = int(config.num_hidden_layers)
    if sorted(probe.shapes) != list(range(count)):
        return None
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            return None
        if kind == "sliding_attention" and layout.windows_seen[layer] is None:
            return None
    return [probe.shapes[layer] for layer in range(count)]


def _agrees(base: BaseModel, shapes: list[LayerShape]) -> bool:
    """Compares two sequences read and continued together with each alone."""
    device = base.device
    cache = KVCache(shapes, base.dtype, device, longest=16)
    tokens = [torch.arange(1, n + 1, device=device) % base.vocab_size for n in (5, 8)]
    slots = [cache.new(16) for _ in tokens]
    parts, first = [], 0
    for slot, row in zip(slots, tokens, strict=True):
        parts.append(PrefillRow(slot, first, len(row) - 1))
        first += len(row) - 1
    read = torch.cat([row[:-1] for row in tokens])
    positions = torch.cat([torch.arange(len(row) - 1, device=device) for row in tokens])
    base.hidden_of_batch(read, positions, BatchLayout(parts), [])
    lengths = [len(row) - 1 for row in tokens]
    found = base.hidden_of_batch(
        torch.stack([row[-1] for row in tokens]),
        torch.tensor(lengths, device=device),
        BatchLayout([DecodeRows(slots[0].arena, 0, lengths)]),
        [],
    )
    expected = torch.cat([base.hidden(row[None])[:, -1] for row in tokens])
    error = (found - expected).float().norm() / expected.float().norm()
    return error.item() <= (1e-4 if base.dtype == torch.float32 else 0.05)
