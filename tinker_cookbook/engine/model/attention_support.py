"""Checks once, on a few tokens, whether a model supports the engine's own attention.

Continuous batching and shared prefixes replace attention, so every layer must be attention of a
known kind. Models with recurrent layers, or with sliding windows given only as a mask, are sampled
one request at a time with transformers' own cache and trained without shared prefixes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from tinker_cookbook.engine.model.low_rank import Segments
from tinker_cookbook.engine.sampling.batch_attention import BatchLayout
from tinker_cookbook.engine.sampling.paged_cache import LayerShape, PagedCache, Run
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


class _Probe(BatchLayout):
    """Layout that records what each layer would store."""

    def __init__(self) -> None:
        super().__init__([])
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        plain = softcap is None and sinks is None
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], plain)
        return query.new_zeros(*query.shape[:2], value.shape[2])


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
    probe = _Probe()
    tokens = torch.arange(2, device=base.device)
    base.hidden_of_batch(tokens, tokens, probe, Segments([]))
    if not _every_layer_asked(base, probe.windows_seen):
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
    cache = PagedCache(shapes, base.dtype, device)
    sequences = [_row(base, probe_tokens(base.vocab_size, n)) for n in (5, 8, 12, 3)]
    lengths = [row.shape[1] - 1 for row in sequences]
    tables = [cache.new(length + 1) for length in lengths]
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    prefill = [Run(*run) for run in zip(tables, [0] * 4, firsts, lengths, strict=True)]
    positions = [torch.arange(length, device=device) for length in lengths]
    read = torch.cat([row[0, :-1] for row in sequences])
    base.hidden_of_batch(read, torch.cat(positions), BatchLayout(prefill), Segments([]))
    decode = [
        Run(table, length, i, 1, decodes=True)
        for i, (table, length) in enumerate(zip(tables, lengths, strict=True))
    ]
    found = base.hidden_of_batch(
        torch.stack([row[0, -1] for row in sequences]),
        torch.tensor(lengths, device=device),
        BatchLayout(decode),
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
