"""Checks once, on a few tokens, whether a model supports the engine's own attention.

Continuous batching and shared prefixes replace attention, so every layer must be attention of a
known kind. Models with recurrent layers, or with sliding windows given only as a mask, are sampled
one request at a time with transformers' own cache and trained without shared prefixes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from tinker_cookbook.engine.model.low_rank import Segments
from tinker_cookbook.engine.sampling.batch_attention import (
    AttentionCall,
    BatchLayout,
    decoding,
    reading,
)
from tinker_cookbook.engine.sampling.kv_cache import LayerShape
from tinker_cookbook.engine.sampling.paged_cache import cache_for
from tinker_cookbook.engine.training import tree_attention
from tinker_cookbook.engine.training.prefix_tree import lay_out

logger = logging.getLogger(__name__)


class ProbedModel(Protocol):
    """Interface of the base model that the checks use (``base_model.BaseModel``)."""

    name: str
    config: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, L, H] of rows of tokens."""
        ...

    def hidden_of_batch(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout,
        segments: Segments,
    ) -> torch.Tensor:
        """Hidden states [N, H] of the tokens of a step of the sampler."""
        ...

    def hidden_of_tree(
        self, tokens: torch.Tensor, positions: torch.Tensor, layout: tree_attention.TreeLayout
    ) -> torch.Tensor:
        """Hidden states [1, L, H] of a row whose sequences share beginnings."""
        ...


class _Probe:
    """Fake sequence that records what each layer would store."""

    first = 0

    def __init__(self, count: int) -> None:
        self.count = count
        self.shapes: dict[int, LayerShape] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])

    def attend(self, layer: int, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        plain = call.softcap is None and call.sinks is None
        self.shapes[layer] = replace(self.shapes[layer], plain=plain)
        return query.new_zeros(*query.shape[:2], self.shapes[layer].value)


@torch.no_grad()
def check_batch_attention(base: ProbedModel) -> list[LayerShape] | None:
    """Returns the cache shapes of all layers, or ``None`` if the check fails."""
    try:
        shapes = _shapes(base)
        if shapes is not None and _agrees(base, shapes):
            return shapes
        reason = "its layers keep more than keys and values"
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error)
    logger.info("%s: requests are sampled one by one: %s", base.name, reason)
    return None


def _shapes(base: ProbedModel) -> list[LayerShape] | None:
    """Returns the shapes of all layers in order; ``None`` if one is not attention or has its window
    only in a mask."""
    probe = _Probe(2)
    layout = BatchLayout([probe])  # type: ignore[list-item]
    tokens = torch.arange(2, device=base.device)
    base.hidden_of_batch(tokens, tokens, layout, Segments([]))
    if not _every_layer_asked(base, layout.windows_seen):
        return None
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]


def _every_layer_asked(base: ProbedModel, windows: Mapping[int, int | None]) -> bool:
    """Returns whether all layers called the attention, each of a known kind and with its window."""
    config = getattr(base.config, "text_config", base.config)
    count = int(config.num_hidden_layers)
    if sorted(windows) != list(range(count)):
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    if not {"full_attention", "sliding_attention"}.issuperset(kinds):
        return False
    return all(windows[i] is not None for i, kind in enumerate(kinds) if kind[0] == "s")


def _agrees(base: ProbedModel, shapes: list[LayerShape]) -> bool:
    """Compares batched prefill and decode with each sequence alone."""
    device = base.device
    cache = cache_for(shapes, base.dtype, device, longest=16)
    sequences = [_row(base, probe_tokens(base.vocab_size, n)) for n in (5, 8, 12, 3)]
    slots = [cache.new(16) for _ in sequences]
    parts, first = [], 0
    for slot, row in zip(slots, sequences, strict=True):
        parts.append(reading(slot, first, row.shape[1] - 1))
        first += row.shape[1] - 1
    positions = [torch.arange(row.shape[1] - 1, device=device) for row in sequences]
    read = torch.cat([row[0, :-1] for row in sequences])
    base.hidden_of_batch(read, torch.cat(positions), BatchLayout(parts), Segments([]))
    lengths = [row.shape[1] - 1 for row in sequences]
    for slot, length in zip(slots, lengths, strict=True):
        slot.length = length
    found = base.hidden_of_batch(
        torch.stack([row[0, -1] for row in sequences]),
        torch.tensor(lengths, device=device),
        BatchLayout(decoding(slots, 0)),
        Segments([]),
    )
    return _close(found, torch.cat([base.hidden(row)[:, -1] for row in sequences]))


@torch.no_grad()
def check_tree_attention(base: ProbedModel) -> bool:
    """Returns whether sequences may share a row: compares two with a common prefix with each
    alone."""
    tokens = probe_tokens(base.vocab_size, 19)
    sequences = [tokens[:11], np.concatenate([tokens[:3], tokens[11:]])]
    row = lay_out(sequences, shortest=1)
    layout = tree_attention.TreeLayout.of([row], base.device)
    try:
        found = base.hidden_of_tree(
            torch.from_numpy(row.tokens).to(base.device)[None],
            torch.from_numpy(row.positions).to(base.device)[None],
            layout,
        )[0]
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        logger.info("%s: prefixes are not shared: %s", base.name, error)
        return False
    if not _every_layer_asked(base, layout.windows_seen):
        return False
    pairs = zip(sequences, row.where, strict=True)
    return all(
        _close(found[torch.from_numpy(where)], base.hidden(_row(base, sequence))[0])
        for sequence, where in pairs
    )


def probe_tokens(vocab_size: int, count: int) -> np.ndarray:
    """Returns ids from the whole vocabulary, since models behave unusually on special tokens."""
    return (vocab_size // 3 + 37 * np.arange(count)) % vocab_size


def _row(base: ProbedModel, sequence: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(sequence).to(base.device)[None]


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether most positions [T, H] agree; rounding may affect single ones."""
    error = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return error.median().item() <= (1e-4 if found.dtype == torch.float32 else 0.1)
