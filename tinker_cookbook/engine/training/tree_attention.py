"""Tree attention: attention over a row in which sequences share prefixes (``prefix_tree``).

A short row is computed in one call with a mask. In a long row, the mask would hide most scores, so
siblings (segments that continue one path) are computed as a small batch: their queries attend to
the shared keys of the path and, causally, to the keys of their own segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.kernels import grouped_attention
from tinker_cookbook.engine.model.attention_hook import AttentionCall, causal_bias
from tinker_cookbook.engine.training.prefix_tree import Siblings, TreeRow

_HIDDEN_SCORES = 1 << 17
"""Maximum number of scores that the mask of a whole row may hide; above it, siblings are computed
as batches. Their extra copies (about ninety small operators per layer and pass) cost as much.
"""


class _Part(ABC):
    """Queries and keys of a row that attention computes in one call."""

    causal = False
    """Whether the part is purely causal, apart from a window."""

    def __init__(self) -> None:
        self._biases: dict[int | None, Tensor] = {}

    def bias(self, window: int | None) -> Tensor:
        """Returns fp32 [1, L, S]: 0 where a query sees a key, -inf elsewhere; cached for all
        layers."""
        if window not in self._biases:
            self._biases[window] = self._bias(window)
        return self._biases[window]

    @abstractmethod
    def _bias(self, window: int | None) -> Tensor: ...

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Returns the attention [tokens, heads, D] of the part."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Returns the attention [N, heads, L, D] of q over S keys and values [N, kv heads, S,
        D]."""
        # On a CPU, torch's fused kernel computes bfloat16 gradients several times slower than
        # batched products.
        if q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu":
            return grouped_attention(q, k, v, self.bias(call.window), call.scale)
        # Repeat the keys: torch's ``enable_gqa`` was several times slower on a CPU.
        group = q.shape[1] // k.shape[1]
        causal = self.causal and call.window is None
        # The mask needs four dimensions: with three, torch does not use its fused kernel.
        return F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
            attn_mask=None if causal else self.bias(call.window)[None].to(q.dtype),
            is_causal=causal,
            scale=call.scale,
        )


class _Batch(_Part):
    """Siblings as a batch: ``_path`` [P], and ``_indices`` [N, L], padded with index 0."""

    def __init__(self, siblings: Siblings, start: int, device: torch.device) -> None:
        super().__init__()
        # Padded keys come after all tokens of their segment, so the causal mask hides them.
        indices = np.zeros((len(siblings.segments), siblings.longest), dtype=np.int64)
        for row, segment in zip(indices, siblings.segments, strict=True):
            row[: len(segment)] = segment + start
        self._indices = torch.from_numpy(indices).to(device)
        self._path = torch.from_numpy(siblings.path + start).to(device)
        self.causal = not len(siblings.path)

    def _bias(self, window: int | None) -> Tensor:
        # One mask for all siblings: only padded queries see padding, and their results are dropped.
        before, length = len(self._path), self._indices.shape[1]
        key = torch.arange(before + length, device=self._path.device)
        return causal_bias(key[before:], key, window)[None]

    def attend(self, call: AttentionCall) -> Tensor:
        count, length = self._indices.shape
        flat = self._indices.flatten()

        # Tensors [T, heads, D] become [N, heads, L, D], so that one call computes all siblings.
        def of_siblings(tensor: Tensor) -> Tensor:
            rows = tensor.index_select(0, flat).view(count, length, *tensor.shape[1:])
            return rows.transpose(1, 2)

        def with_path(tensor: Tensor) -> Tensor:
            if not len(self._path):
                return of_siblings(tensor)
            path = tensor.index_select(0, self._path).transpose(0, 1)
            return torch.cat([path.expand(count, *path.shape), of_siblings(tensor)], dim=2)

        q, k, v = of_siblings(call.query), with_path(call.key), with_path(call.value)
        out = self.attention(q, k, v, call)
        return out.transpose(1, 2).reshape(count * length, q.shape[1], -1)


class _Whole(_Part):
    """The whole row [T] under one mask."""

    def __init__(self, rows: Sequence[tuple[TreeRow, int]], device: torch.device) -> None:
        super().__init__()
        self._length = sum(len(row.tokens) for row, _ in rows)
        self._device = device
        self._segments = [
            (siblings.path + start, segment + start, row.last_seen, start)
            for row, start in rows
            for siblings in row.siblings
            for segment in siblings.segments
        ]

    def _bias(self, window: int | None) -> Tensor:
        # Start with everything hidden. Each segment then sees its path and, causally, itself. Keys
        # are numbered along the path, so a sliding window counts along it too.
        bias = np.full((self._length, self._length), -np.inf, dtype=np.float32)
        for path, segment, last_seen, start in self._segments:
            key = torch.arange(len(path) + len(segment))
            last = None if last_seen is None else torch.from_numpy(last_seen[segment - start])
            seen = causal_bias(key[len(path) :], key, window, last)
            bias[np.ix_(segment, np.concatenate([path, segment]))] = seen.numpy()
        return torch.from_numpy(bias)[None].to(self._device)

    def attend(self, call: AttentionCall) -> Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (call.query, call.key, call.value))
        return self.attention(q, k, v, call)[0].transpose(0, 1)


@dataclass
class TreeLayout:
    """A row [T], split into parts; ``order`` [T] is each token's index in their concatenation
    (``None``: the same order)."""

    parts: Sequence[_Part]
    order: Tensor | None = None
    windows_seen: dict[int, int | None] = field(default_factory=dict)
    """Sliding window of each layer that was called. The check at load reads it."""

    @classmethod
    def of(cls, rows: Sequence[TreeRow], device: torch.device) -> TreeLayout:
        """Returns the layout of consecutive rows."""
        starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
        placed = list(zip(rows, starts.tolist(), strict=False))
        needed = sum(siblings.scores for row in rows for siblings in row.siblings)
        # Siblings share one mask, which images that see themselves have not.
        masked = any(row.last_seen is not None for row in rows)
        if masked or starts[-1] ** 2 - needed <= _HIDDEN_SCORES:
            return cls([_Whole(placed, device)])
        # Each group of siblings is one padded batch; ``order`` gathers the real tokens.
        batches, order, padded = [], np.empty(starts[-1], dtype=np.int64), 0
        for siblings, start in ((s, start) for row, start in placed for s in row.siblings):
            batches.append(_Batch(siblings, start, device))
            for segment in siblings.segments:
                order[segment + start] = padded + np.arange(len(segment))
                padded += siblings.longest
        return cls(batches, torch.from_numpy(order).to(device))

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns the attention [T, heads, D]; raises ``ValueError`` for a soft cap or sinks."""
        if call.softcap is not None or call.sinks is not None:
            raise ValueError("attention with a soft cap or sinks")
        found = [part.attend(call) for part in self.parts]
        return found[0] if self.order is None else torch.cat(found).index_select(0, self.order)
