"""Attention over a batch that mixes decode tokens and prefill chunks.

The tokens of all sequences form one row [1, T], so every linear layer is a single product. Only
attention needs to know which token belongs to which sequence: a ``BatchLayout`` holds the position
of each. New keys and values are written to the KV cache before attention reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch.nn import functional as F  # noqa: N812

from tinker_cookbook.engine.kernels import PagedAttention, PagedRun
from tinker_cookbook.engine.model.attention_hook import causal_bias
from tinker_cookbook.engine.sampling.kv_cache import Arena, KVSlot, Slot
from tinker_cookbook.engine.sampling.paged_cache import PagedSlot

BLOCK = 64
"""Query block of a prefill. The capacity of a slot is a multiple of it, or the whole context."""


class DecodeRows:
    """Decode tokens of a group of slots, one token each, in the order of the slots.

    ``first`` is the index of their first token in the batch.
    """

    def __init__(self, arena: Arena, first: int, slots: Sequence[Slot]) -> None:
        self.arena, self.first, self.count = arena, first, len(slots)
        device = arena.device
        self._at = torch.tensor([slot.length for slot in slots], device=device)
        # All of them are a view; a part, as where a step is tried in halves, is copied.
        self._all = len(slots) == len(arena.slots)
        if self._all:
            self._places = torch.arange(self.count, device=device)
        else:
            self._places = torch.tensor([slot.index for slot in slots], device=device)
        self._biases: dict[int | None, torch.Tensor] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes this step's ``key`` and ``value`` [R, kv heads, D] to the cache."""
        self.arena.keys[layer][self._places, :, self._at] = key
        self.arena.values[layer][self._places, :, self._at] = value

    def attend(self, layer: int, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Returns attention [R, heads, D] of ``query`` [R, heads, D] over each row's cache."""
        keys = self._chosen(self.arena.keys[layer])
        values = self._chosen(self.arena.values[layer])
        count, kv_heads, capacity, width = keys.shape
        grouped = query.reshape(count * kv_heads, -1, width)
        weights = call.weights(
            grouped,
            keys.reshape(count * kv_heads, capacity, width),
            self._bias(call.window, kv_heads),
            count,
        )
        out = torch.bmm(weights, values.reshape(count * kv_heads, capacity, -1))
        return out.view(count, query.shape[1], -1)

    def _chosen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Selects rows of ``tensor`` and keeps its memory layout, because products round
        differently in another one."""
        if self._all:
            return tensor[: self.count]
        if tensor.is_contiguous():
            return tensor.index_select(0, self._places)
        return tensor.transpose(2, 3).index_select(0, self._places).transpose(2, 3)

    def _bias(self, window: int | None, kv_heads: int) -> torch.Tensor:
        """Returns fp32 [R * kv heads, 1, capacity]: 0 for visible keys, -inf for others."""
        if window not in self._biases:
            index = torch.arange(self.arena.capacity, device=self._at.device)
            bias = causal_bias(self._at, index, window)
            self._biases[window] = bias.repeat_interleave(kv_heads, 0)[:, None]
        return self._biases[window]


class PrefillRow:
    """Prefill chunk of one sequence: ``count`` tokens that begin at ``first`` in the batch.

    Query blocks begin at multiples of ``BLOCK`` in the sequence and are padded to full size. So the
    same matrix products run wherever a prompt was split, by a cached prefix or by the token budget
    of a step, and the results are equal to the bit.
    """

    def __init__(self, slot: Slot, first: int, count: int) -> None:
        self.slot, self.first, self.count = slot, first, count
        self._start = slot.length
        self._biases: dict[tuple[int, int | None], torch.Tensor] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes ``key`` and ``value`` [S, kv heads, D] to the cache."""
        arena, end = self.slot.arena, self._start + self.count
        arena.keys[layer][self.slot.index, :, self._start : end] = key.transpose(0, 1)
        arena.values[layer][self.slot.index, :, self._start : end] = value.transpose(0, 1)

    def attend(self, layer: int, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Returns causal attention [S, heads, D] of ``query`` [S, heads, D]."""
        before = self._start % BLOCK
        after = -(self._start + self.count) % BLOCK
        blocks = F.pad(query, (0, 0, 0, 0, before, after)).split(BLOCK)
        first = self._start // BLOCK
        outs = [self._block(layer, first + i, block, call) for i, block in enumerate(blocks)]
        return torch.cat(outs)[before : before + self.count]

    def _block(
        self, layer: int, number: int, query: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Returns the attention of one block of queries [BLOCK, heads, D]."""
        arena = self.slot.arena
        end = min((number + 1) * BLOCK, arena.capacity)
        keys = arena.keys[layer][self.slot.index, :, :end]
        values = arena.values[layer][self.slot.index, :, :end]
        kv_heads, _, width = keys.shape
        grouped = query.transpose(0, 1).reshape(kv_heads, -1, width)
        group = grouped.shape[1] // BLOCK
        bias = self._bias(number, end, call.window).repeat(1, group, 1)
        out = torch.bmm(call.weights(grouped, keys, bias, 1), values)
        return out.view(query.shape[1], BLOCK, -1).transpose(0, 1)

    def _bias(self, number: int, end: int, window: int | None) -> torch.Tensor:
        """Returns fp32 [1, BLOCK, end]: 0 for visible keys, -inf for others."""
        if (number, window) not in self._biases:
            device = self.slot.arena.device
            query = torch.arange(number * BLOCK, (number + 1) * BLOCK, device=device)
            bias = causal_bias(query, torch.arange(end, device=device), window)
            self._biases[number, window] = bias[None]
        return self._biases[number, window]


@dataclass(frozen=True)
class AttentionCall:
    """Attention settings of one layer."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def weights(
        self, query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Returns attention weights [N, Q, K] of ``query`` [N, Q, D] over ``keys`` [N, K, D].

        ``bias`` [N or 1, Q or 1, K]; N is ``count`` sequences times kv heads. Scores and softmax
        are fp32.
        """
        if query.dtype == torch.float32 and self.softcap is None:
            scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=self.scale)
        else:
            scores = torch.bmm(query, keys.transpose(1, 2)).float().mul_(self.scale)
            if self.softcap is not None:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            scores += bias
        if self.sinks is None:
            return scores.softmax(-1).to(query.dtype)
        return self._with_sinks(scores, count).to(query.dtype)

    def _with_sinks(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Computes softmax with an extra sink logit for each head, whose weight is dropped."""
        assert self.sinks is not None
        kv_heads = len(scores) // count
        sinks = self.sinks.float().view(1, kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(scores.shape[1] // sinks.shape[2], 2)
        sinks = sinks.expand(count, -1, -1, -1).reshape(len(scores), scores.shape[1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


Part: TypeAlias = DecodeRows | PrefillRow | PagedRun
"""Tokens of a step; a ``PagedRun`` where the compiled routine attends."""


def decoding(slots: Sequence[KVSlot], first: int) -> list[Part]:
    """Returns the decode part for ``slots``, a group of one cache; ``first`` is its index in the
    batch."""
    if isinstance(slots[0], Slot):
        together = [slot for slot in slots if isinstance(slot, Slot)]
        return [DecodeRows(slots[0].arena, first, together)]
    paged = (slot for slot in slots if isinstance(slot, PagedSlot))
    return [PagedRun(slot, slot.length, first + i, 1) for i, slot in enumerate(paged)]


def reading(slot: KVSlot, first: int, count: int) -> Part:
    """Returns the part for a prefill chunk of ``count`` tokens."""
    if isinstance(slot, Slot):
        return PrefillRow(slot, first, count)
    assert isinstance(slot, PagedSlot)
    return PagedRun(slot, slot.length, first, count)


@dataclass
class BatchLayout:
    """Positions of the sequences in the token row of a batch."""

    parts: Sequence[Part]
    windows_seen: dict[int, int | None] = field(default_factory=dict)
    """Sliding window of each layer; the check at load reads it."""

    @cached_property
    def slots(self) -> PagedAttention | None:
        """Returns the slots of all parts for one call of the C kernel, if it supports them."""
        runs = [part for part in self.parts if isinstance(part, PagedRun)]
        return PagedAttention(runs) if runs else None

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
        """Writes keys and values [T, kv heads, D] to the cache, then returns the attention
        [T, heads, D] of ``query`` [T, heads, D]."""
        if self.slots is not None:  # a paged cache: the layers have neither a cap nor sinks
            return self.slots(layer, query, key, value, scale, window)
        call = AttentionCall(scale, window, softcap, sinks)
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
        for part in self.parts:
            assert not isinstance(part, PagedRun)
            here = slice(part.first, part.first + part.count)
            part.write(layer, key[here], value[here])
            out[here] = part.attend(layer, query[here], call)
        return out
