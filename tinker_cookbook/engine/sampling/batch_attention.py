"""Attention of one step, over a batch that mixes decode tokens and prefill chunks.

The tokens of all sequences form one row [1, T], so every linear layer is a single product. Only
attention needs to know which token belongs to which sequence (``BatchLayout``).

On a GPU, launching a kernel takes as long as a short product. So sequences are padded to one
length: decode tokens of all lengths, and prefill chunks of all prompts, are one call of torch's
fused attention each. A CPU for which the C kernel cannot be compiled uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.kernels import PagedAttention
from tinker_cookbook.engine.model.attention_hook import AttentionCall, causal_bias
from tinker_cookbook.engine.sampling.paged_cache import BLOCK, PagedCache, TokenSpan, slots

_QUERIES = 512
"""Tokens of a prefill chunk in one row: a shorter row computes fewer scores of later tokens."""

_COPY = 64
"""Number of scores per key that cost as much as copying the key from the cache (an estimate)."""

_SLACK = 1 << 20
"""Padding (in scores) that is always accepted, because it costs no more than another call."""

_GROUP_BYTES = 1 << 30
"""Maximum memory of keys and values, or of scores, in one call."""

_HEADS = 64
"""Query heads of a large model, to estimate the memory of unfused scores."""


def _padded(run: TokenSpan) -> int:
    """Number of keys of a run, in whole blocks."""
    return -(-(int(run.seen.max()) + 1) // BLOCK) * BLOCK


def grouped(runs: Sequence[TokenSpan], cache: PagedCache) -> list[list[TokenSpan]]:
    """Returns the runs that are padded to a common length, in the order of the batch.

    A new group starts if more than half of the work would be padding, or at the memory limit.
    """
    groups: list[list[TokenSpan]] = []
    needed = queries = 0
    score_bytes = cache.dtype.itemsize if cache.plain else 8 * _HEADS
    layer_bytes = -(-cache.bytes_per_token // len(cache.keys))
    for run in sorted(runs, key=_padded, reverse=True):
        needed += _padded(run) * (run.count + _COPY)
        queries = max(queries, run.count)
        if groups:
            keys = (len(groups[-1]) + 1) * _padded(groups[-1][0])
            fits = keys * max(layer_bytes, queries * score_bytes) <= _GROUP_BYTES
            if fits and keys * (queries + _COPY) <= max(2 * needed, needed + _SLACK):
                groups[-1].append(run)
                continue
        groups.append([run])
        needed, queries = _padded(run) * (run.count + _COPY), run.count
    return [sorted(group, key=lambda run: run.first) for group in groups]


def _weights(call: AttentionCall, query: Tensor, keys: Tensor, bias: Tensor, count: int) -> Tensor:
    """Returns attention weights [N, Q, K] of ``query`` [N, Q, D] over ``keys`` [N, K, D].

    ``bias`` [N or 1, Q or 1, K]; N is ``count`` sequences times kv heads. Scores and softmax are
    fp32.
    """
    scores = torch.bmm(query, keys.transpose(1, 2)).float().mul_(call.scale)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores += bias
    if call.sinks is None:
        return scores.softmax(-1).to(query.dtype)
    # A sink is an additional logit per head; its weight is dropped after the softmax.
    kv_heads = len(scores) // count
    sinks = call.sinks.float().view(1, kv_heads, -1, 1)
    sinks = sinks.repeat_interleave(scores.shape[1] // sinks.shape[2], 2)
    sinks = sinks.expand(count, -1, -1, -1).reshape(len(scores), scores.shape[1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(query.dtype)


class _Group:
    """N runs, padded to L queries and S keys each."""

    def __init__(self, cache: PagedCache, runs: Sequence[TokenSpan]) -> None:
        self._cache, self._count = cache, len(runs)
        self._length = length = max(run.count for run in runs)
        blocks = max(map(_padded, runs)) // BLOCK
        # Past the end of a run, repeat its last query and its first block: finite numbers
        # that are dropped or have weight 0.
        rows = np.empty((len(runs), blocks + 3 * length), dtype=np.int64)
        for row, run in zip(rows, runs, strict=True):
            mine = [block.index for block in run.table.blocks[: _padded(run) // BLOCK]]
            row[:blocks] = mine + mine[:1] * (blocks - len(mine))
            offsets = np.minimum(np.arange(length), run.count - 1)
            row[blocks : blocks + length] = run.position + offsets
            row[blocks + length : -length] = run.seen[offsets]
            row[-length:] = run.first + offsets
        self.where = rows[:, -length:].flatten()
        """Index in the batch of each query [N * L]."""
        self._first = bool((self.where == np.arange(len(self.where))).all())
        on_device = torch.from_numpy(rows).to(cache.device)  # one copy for all
        self._table = on_device[:, :blocks]
        self._position = on_device[:, blocks : blocks + length].flatten()
        self._seen = on_device[:, blocks + length : -length].flatten()
        self._where = on_device[:, -length:].flatten()
        self._blocks: dict[int, Tensor] = {}
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns [N, 1, L, S]: 0 for visible keys, -inf for others; one for all layers."""
        if (window, dtype) not in self._biases:
            key = torch.arange(self._table.shape[1] * BLOCK, device=self._table.device)
            bias = causal_bias(self._position, key, window, self._seen)
            bias = bias.view(self._count, 1, self._length, -1)
            self._biases[window, dtype] = bias.to(dtype)
        return self._biases[window, dtype]

    def _read(self, pool: Tensor) -> Tensor:
        """Returns the keys or the values [N, kv heads, S, D] of a layer."""
        heads, width = pool.shape[1], pool.shape[3]
        if heads not in self._blocks:
            head = torch.arange(heads, device=pool.device)
            self._blocks[heads] = (self._table[:, None] * heads + head[:, None]).flatten()
        # One copy of BLOCK * width adjacent numbers for each block and head.
        found = pool.view(-1, BLOCK * width).index_select(0, self._blocks[heads])
        return found.view(self._count, heads, -1, width)

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns the attention [N * L, heads, D] of the queries."""
        count, length = self._count, self._length
        query = call.query
        flat = query[: len(self.where)] if self._first else query.index_select(0, self._where)
        heads, width = flat.shape[1:]
        keys = self._read(self._cache.keys[call.layer])
        values = self._read(self._cache.values[call.layer])
        kv_heads = keys.shape[1]
        if call.softcap is not None or call.sinks is not None:
            return self._unfused(call, flat, keys, values)
        bias = self._bias(call.window, flat.dtype)
        if length == 1:
            # The query heads of one kv head are its queries: keys need not be repeated.
            query = flat.reshape(count, kv_heads, -1, width)
            found = F.scaled_dot_product_attention(query, keys, values, bias, scale=call.scale)
            return found.reshape(count, heads, -1)
        query = flat.view(count, length, heads, width).transpose(1, 2)
        if heads > kv_heads:  # with a mask torch has no fused kernel for grouped heads
            group = heads // kv_heads
            keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        found = F.scaled_dot_product_attention(query, keys, values, bias, scale=call.scale)
        return found.transpose(1, 2).reshape(count * length, heads, -1)

    def _unfused(self, call: AttentionCall, flat: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention with a soft cap or sinks, which the fused kernels do not have."""
        (count, length), (heads, width) = (self._count, self._length), flat.shape[1:]
        kv_heads = keys.shape[1]
        # [N * kv heads, query heads of one kv head * L, D]
        query = flat.view(count, length, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        query = query.reshape(count * kv_heads, -1, width)
        bias = self._bias(call.window, torch.float32)
        bias = bias.expand(count, heads, length, -1).reshape(len(query), -1, bias.shape[-1])
        weights = _weights(call, query, keys.flatten(0, 1), bias, count)
        found = torch.bmm(weights, values.flatten(0, 1))
        found = found.view(count, heads, length, -1).transpose(1, 2)
        return found.reshape(count * length, heads, -1)


class PaddedAttention:
    """Attention of one step over a paged cache, with torch's operators."""

    def __init__(self, runs: Sequence[TokenSpan]) -> None:
        self._cache = cache = runs[0].table.cache
        cache.settle()
        self._slots = slots(runs)
        most = _QUERIES if cache.plain else BLOCK
        decoding = [run for run in runs if run.count == 1]
        rows = [
            replace(
                run,
                position=run.position + start,
                first=run.first + start,
                count=min(most, run.count - start),
                last_seen=run.seen[start : start + most],
            )
            for run in runs
            if run.count > 1
            for start in range(0, run.count, most)
        ]
        self._groups = [_Group(cache, some) for some in grouped(decoding, cache)]
        self._groups += [_Group(cache, some) for some in grouped(rows, cache)]
        self._order: Tensor | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        """Writes keys and values to the cache; returns the attention [T, heads, D]. Padding
        after the last run has arbitrary values."""
        # First the writes: a token attends to itself and to earlier tokens of its chunk.
        self._cache.write(call.layer, self._slots, call.key, call.value)
        found = [group.attend(call) for group in self._groups]
        flat = found[0] if len(found) == 1 else torch.cat(found)
        if self._order is None:
            self._order = self._order_of(len(call.query))
        return flat.index_select(0, self._order) if len(self._order) else flat

    def _order_of(self, tokens: int) -> Tensor:
        """Returns where each of the batch's tokens is in the results; empty if in order."""
        where = np.concatenate([group.where for group in self._groups])
        order = np.zeros(tokens, dtype=np.int64)
        order[where] = np.arange(len(where))
        if len(where) == tokens and np.array_equal(order, np.arange(tokens)):
            order = order[:0]
        return torch.from_numpy(order).to(self._cache.device)


class BatchLayout:
    """Runs of tokens of a step, one for each sequence, consecutive in the batch."""

    def __init__(self, runs: Sequence[TokenSpan]) -> None:
        self.runs = runs
        self.windows_seen: dict[int, int | None] = {}
        """Sliding window of each layer that was called. The check at load reads it."""

    @cached_property
    def _attention(self) -> PagedAttention | PaddedAttention:
        # Created at the first layer and used by all, because the runs are the same.
        kind = PagedAttention if self.runs[0].table.cache.native else PaddedAttention
        return kind(self.runs)

    def attend(self, call: AttentionCall) -> Tensor:
        """Writes keys and values to the cache; returns the attention [T, heads, D]."""
        return self._attention(call)
