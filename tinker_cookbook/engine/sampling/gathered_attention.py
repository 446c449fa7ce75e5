"""Attention of one step on a CPU with torch's operators, for any kind of attention.

It is used where the C kernel does not apply: soft caps, sinks, other dtypes, a machine without a
compiler. Decode tokens of similar length share a product, and a prefill chunk has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.model.attention_hook import AttentionCall, causal_bias
from tinker_cookbook.engine.sampling.paged_cache import BLOCK, PagedCache, Run, slots


def attention_weights(
    call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, count: int
) -> torch.Tensor:
    """Returns attention weights [N, Q, K] of ``query`` [N, Q, D] over ``keys`` [N, K, D].

    ``bias`` [N or 1, Q or 1, K]; N is ``count`` sequences times kv heads. Scores and softmax are
    fp32.
    """
    # In fp32, bias, scale and product are one call; lower precisions need fp32 scores.
    if query.dtype == torch.float32 and call.softcap is None:
        scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=call.scale)
    else:
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


class _Gathered:
    """Keys and values of sequences whose attention is computed together.

    Each layer gathers the blocks of their tables [R, n] into contiguous memory, because torch's
    products cannot follow a block table.
    """

    def __init__(self, cache: PagedCache, runs: Sequence[Run], blocks: int) -> None:
        self._cache, self.count = cache, len(runs)
        # Repeat the first block past the end of a table: finite numbers with weight 0.
        tables = [[block.index for block in run.table.blocks[:blocks]] for run in runs]
        padded = [table + table[:1] * (blocks - len(table)) for table in tables]
        self._table = torch.tensor(padded, device=cache.device)
        self._rows: dict[int, torch.Tensor] = {}
        self._buffers: dict[object, torch.Tensor] = {}
        self._biases: dict[object, torch.Tensor] = {}

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and the values [R * kv heads, n * BLOCK, D] of a layer."""
        out = []
        for kind, pool in enumerate((self._cache.keys[layer], self._cache.values[layer])):
            heads, width = pool.shape[1], pool.shape[3]
            if heads not in self._rows:
                head = torch.arange(heads, device=pool.device)
                self._rows[heads] = (self._table[:, None] * heads + head[:, None]).flatten()
            rows, key = self._rows[heads], (kind, heads, width)
            # All layers use the same memory: on a CPU, new memory costs more than the copy.
            if key not in self._buffers:
                self._buffers[key] = pool.new_empty(len(rows), BLOCK * width)
            # One copy of BLOCK * width adjacent numbers for each block and head.
            torch.index_select(pool.view(-1, BLOCK * width), 0, rows, out=self._buffers[key])
            out.append(self._buffers[key].view(self.count * heads, -1, width))
        return out[0], out[1]


class _DecodeGroup(_Gathered):
    """Sequences of similar length that decode one token each.

    The padded length depends on a sequence's own length only, so that its result does not depend on
    the other sequences of the batch.
    """

    def __init__(self, cache: PagedCache, runs: Sequence[Run], blocks: int) -> None:
        super().__init__(cache, runs, blocks)
        self._at = torch.tensor([run.position for run in runs], device=cache.device)
        self._key_at = torch.arange(blocks * BLOCK, device=cache.device)
        self._first = torch.tensor([run.first for run in runs], device=cache.device)

    def attend(self, call: AttentionCall, out: torch.Tensor) -> None:
        """Writes the attention of each sequence's token to ``out`` [T, heads, D]."""
        query = call.query
        keys, values = self.read(call.layer)
        kv_heads = len(keys) // self.count
        # Layers with equal windows share a bias.
        if (bias := self._biases.get((call.window, kv_heads))) is None:
            bias = causal_bias(self._at, self._key_at, call.window)
            bias = bias.repeat_interleave(kv_heads, 0)[:, None]
            self._biases[call.window, kv_heads] = bias
        mine = query[self._first].reshape(len(keys), -1, query.shape[-1])
        weights = attention_weights(call, mine, keys, bias, self.count)
        found = torch.bmm(weights, values)
        out[self._first] = found.view(self.count, *out.shape[1:])


class _PrefillChunk(_Gathered):
    """Prefill chunk of one sequence.

    Query blocks begin at multiples of ``BLOCK`` in the sequence and are padded to full size. So the
    same matrix products run wherever a prompt was split, by a cached prefix or by the token budget
    of a step, and the results are bit-identical.
    """

    def __init__(self, cache: PagedCache, run: Run) -> None:
        super().__init__(cache, [run], -(-(run.position + run.count) // BLOCK))
        self._run = run

    def attend(self, call: AttentionCall, out: torch.Tensor) -> None:
        """Writes the causal attention of the chunk's tokens to ``out`` [T, heads, D]."""
        run, query = self._run, call.query
        keys, values = self.read(call.layer)
        # Queries are aligned to blocks of the sequence, whatever chunk they are in.
        here = slice(run.first, run.first + run.count)
        before = run.position % BLOCK
        after = -(run.position + run.count) % BLOCK
        outs = []
        blocks = F.pad(query[here], (0, 0, 0, 0, before, after)).split(BLOCK)
        seen = self._last_seen(before, after)
        for number, block in enumerate(blocks, run.position // BLOCK):
            end = (number + 1) * BLOCK
            last = None if seen is None else seen[number * BLOCK - run.position + before :][:BLOCK]
            found = self._block(call, block, number, keys[:, :end], values[:, :end], last)
            if last is not None and (longest := int(last.max())) >= end:
                # An image that ends in a later block. Only its queries see more keys: the width of
                # a product changes the rounding of the others, which other chunks compute alone.
                wide = -(-(longest + 1) // BLOCK) * BLOCK
                more = self._block(call, block, number, keys[:, :wide], values[:, :wide], last)
                found = torch.where((last >= end)[:, None, None], more, found)
            outs.append(found)
        out[here] = torch.cat(outs)[before : before + run.count]

    def _block(
        self,
        call: AttentionCall,
        block: torch.Tensor,
        number: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        last_seen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the attention [BLOCK, heads, D] of a block of queries [BLOCK, heads, D]."""
        end = keys.shape[1]
        grouped = block.transpose(0, 1).reshape(len(keys), -1, block.shape[-1])
        if (bias := self._biases.get((number, end, call.window))) is None:
            at = torch.arange(end, device=block.device)
            own = at[number * BLOCK : (number + 1) * BLOCK]
            bias = causal_bias(own, at, call.window, last_seen)[None]
            self._biases[number, end, call.window] = bias
        bias = bias.repeat(1, grouped.shape[1] // BLOCK, 1)
        weights = attention_weights(call, grouped, keys, bias, 1)
        return torch.bmm(weights, values).view(block.shape[1], BLOCK, -1).transpose(0, 1)

    def _last_seen(self, before: int, after: int) -> torch.Tensor | None:
        """Returns the last position that each padded query sees; ``None`` if it is its own."""
        run, seen = self._run, self._run.last_seen
        if seen is None:
            return None
        start = run.position - before
        out = torch.arange(start, run.position + run.count + after, device=self._table.device)
        out[before : before + run.count] = torch.from_numpy(seen).to(out.device)
        return out


class GatheredAttention:
    """Attention of one step with torch's operators, for any kind of attention."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._cache = cache = runs[0].table.cache
        self._slots = slots(runs)
        decoding: dict[int, list[Run]] = {}
        self._groups: list[_DecodeGroup | _PrefillChunk] = []
        for run in runs:
            # Decode tokens of similar length share one product; a chunk has its own.
            if run.decodes:
                decoding.setdefault(_padded_blocks(run.position + 1), []).append(run)
            else:
                self._groups.append(_PrefillChunk(cache, run))
        self._groups += [_DecodeGroup(cache, group, size) for size, group in decoding.items()]

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Writes keys and values to the cache; returns the attention [T, heads, D], 0 after the
        last run."""
        # First the writes: a token attends to itself and to earlier tokens of its chunk.
        self._cache.write(call.layer, self._slots, call.key, call.value)
        out = call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1])
        for group in self._groups:
            group.attend(call, out)
        return out


def _padded_blocks(length: int) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16 … blocks.

    Finer steps would save padding, but each group takes several calls, and a call with few rows
    costs as much as the saved padding.
    """
    blocks = -(-length // BLOCK)
    power = 1 << (blocks - 1).bit_length()
    return power * 3 // 4 if blocks <= power * 3 // 4 else power
