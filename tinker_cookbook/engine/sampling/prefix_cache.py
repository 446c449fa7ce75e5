"""Prefix cache: keys and values of prompts and finished samples, kept for later requests.

The next turn of a conversation begins with the last turn's prompt and answer, so their KV cache is
reused. An entry belongs to one version of the weights: other snapshots never use it, and it is
freed with its sampler.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from tinker_cookbook.engine.sampling.kv_cache import KVCache, KVSlot
from tinker_cookbook.engine.training.prefix_tree import common_prefix

SHORTEST = 16
"""Minimum length of an entry, and of a match, to be worth a copy."""


@dataclass(eq=False)
class _Entry:
    owner: weakref.ref[object]
    tokens: np.ndarray
    slot: KVSlot


class PrefixCache:
    """Prefix cache of at most ``budget`` tokens in slots of ``cache``, with LRU eviction."""

    def __init__(self, cache: KVCache, budget: int) -> None:
        self._cache = cache
        self._budget = budget
        self._entries: list[_Entry] = []  # the least recently used first
        self._held = 0

    def adopt(self, owner: object, tokens: np.ndarray, slot: KVSlot) -> None:
        """Takes over ``slot``, which holds the KV cache of the first of ``tokens``."""
        tokens = tokens[: slot.length]
        if len(tokens) < SHORTEST:
            self._cache.free(slot)
            return
        for entry in [e for e in self._entries if e.owner() is owner]:
            shared = common_prefix(entry.tokens, tokens)
            if shared == len(tokens):  # known already, and perhaps more of it
                self._cache.free(slot)
                return
            if shared == len(entry.tokens):
                self._remove(entry)
        self._entries.append(_Entry(weakref.ref(owner), tokens, slot))
        self._held += slot.capacity
        self.trim(self._budget)

    def find(self, owner: object, tokens: np.ndarray) -> tuple[KVSlot, int] | None:
        """Returns the slot with the longest common prefix with ``tokens``, and the prefix length.

        At least one token is left to compute, because its hidden state is needed.
        """
        best, most = None, SHORTEST - 1
        for entry in self._entries:
            if entry.owner() is owner:
                shared = common_prefix(entry.tokens[: len(tokens) - 1], tokens)
                if shared > most:
                    best, most = entry, shared
        if best is None:
            return None
        self._entries.remove(best)
        self._entries.append(best)
        return best.slot, most

    def purge(self) -> None:
        """Evicts entries whose samplers no longer exist."""
        for entry in [e for e in self._entries if e.owner() is None]:
            self._remove(entry)

    @property
    def held(self) -> int:
        """Capacity in tokens of the slots of all entries."""
        return self._held

    @property
    def spare(self) -> int:
        """Tokens that can be added before an entry is evicted."""
        return max(0, self._budget - self._held)

    def trim(self, budget: int) -> None:
        """Evicts entries until they hold at most ``budget`` tokens."""
        while self._held > budget and self._entries:
            self._remove(self._entries[0])

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._held -= entry.slot.capacity
        self._cache.free(entry.slot)
