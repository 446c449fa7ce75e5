"""Attention over a row in which sequences share their beginnings (``prefix_tree``).

Siblings, the segments that continue one path, are a small batch: their queries attend to the keys
of the path, which all of them share, and causally to their own. What a mask over the whole row
would hide, most of it where answers to one prompt stand side by side, is never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine import attention_hook
from tinker_cookbook.engine.cpu_attention import grouped_attention
from tinker_cookbook.engine.prefix_tree import Siblings, TreeRow

NAME = "tinker_cookbook_tree"


@dataclass(frozen=True)
class _Batch:
    """Siblings as tensors: ``path`` [P] and ``places`` [N, L], padded with place 0."""

    path: torch.Tensor
    places: torch.Tensor
    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, siblings: Siblings, start: int, device: torch.device) -> _Batch:
        places = np.zeros((len(siblings.places), max(map(len, siblings.places))), dtype=np.int64)
        for row, own in zip(places, siblings.places, strict=True):
            row[: len(own)] = own + start
        path = torch.from_numpy(siblings.path + start)
        return cls(path.to(device), torch.from_numpy(places).to(device))

    def bias(self, window: int | None) -> torch.Tensor:
        """fp32 [1, L, P + L]: 0 where a query sees a key, -inf elsewhere.

        The same for all siblings: beyond a segment's end only queries that nobody reads look.
        """
        if window not in self.biases:
            before, own = len(self.path), self.places.shape[1]
            key = torch.arange(before + own, device=self.path.device)
            self.biases[window] = attention_hook.causal_bias(key[before:], key, window)[None]
        return self.biases[window]


@dataclass(frozen=True)
class TreeLayout:
    """All siblings of a row [T]; ``order`` [T] finds each token in their concatenation."""

    batches: Sequence[_Batch]
    order: torch.Tensor
    windows_seen: dict[int, int | None] = field(default_factory=dict)
    """Window that each layer asked for, kept for the trial at load."""

    @classmethod
    def of(cls, rows: Sequence[TreeRow], device: torch.device) -> TreeLayout:
        """The layout of rows that follow one another."""
        batches, order, start, padded = [], [], 0, 0
        for row in rows:
            places = np.empty(len(row.tokens), dtype=np.int64)
            for siblings in row.siblings:
                batches.append(_Batch.of(siblings, start, device))
                length = batches[-1].places.shape[1]
                for number, own in enumerate(siblings.places):
                    places[own] = padded + number * length + np.arange(len(own))
                padded += len(siblings.places) * length
            order.append(places)
            start += len(row.tokens)
        return cls(batches, torch.from_numpy(np.concatenate(order)).to(device))


_layout: ContextVar[TreeLayout] = ContextVar("tree layout")


def use(layout: TreeLayout) -> AbstractContextManager[None]:
    """Attention inside the block is that of ``layout``."""
    return attention_hook.using(_layout, layout)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q [1, heads, T, D], k and v [1, kv heads, T, D]."""
    unknown = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"attention with {', '.join(unknown)}")
    layout = _layout.get()
    layout.windows_seen[int(module.layer_idx)] = sliding_window  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    parts = [_attend(batch, q, k, v, sliding_window, scale) for batch in layout.batches]
    return torch.cat(parts).index_select(0, layout.order)[None], None


def register() -> None:
    """Makes it known to transformers."""
    attention_hook.register(NAME, attention_forward)


def _attend(
    batch: _Batch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Attention [N * L, heads, D] of some siblings, given q, k and v [T, heads, D] of the row."""
    count, length = batch.places.shape
    own = batch.places.flatten()

    def of_siblings(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.index_select(0, own).view(count, length, *tensor.shape[1:])
        return rows.transpose(1, 2)

    def with_path(tensor: torch.Tensor) -> torch.Tensor:
        if not len(batch.path):
            return of_siblings(tensor)
        path = tensor.index_select(0, batch.path).transpose(0, 1)
        return torch.cat([path.expand(count, *path.shape), of_siblings(tensor)], dim=2)

    queries, keys, values = of_siblings(q), with_path(k), with_path(v)
    if q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu":
        out = grouped_attention(queries, keys, values, batch.bias(window), scale)
    else:
        group = queries.shape[1] // keys.shape[1]
        causal = not len(batch.path) and window is None
        out = F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(group, 1),
            values.repeat_interleave(group, 1),
            attn_mask=None if causal else batch.bias(window).to(q.dtype),
            is_causal=causal,
            scale=scale,
        )
    return out.transpose(1, 2).reshape(count * length, queries.shape[1], -1)
