"""Prefix cache: KV caches of prompts and finished samples, kept for later requests.

The next turn of a conversation begins with the last turn's prompt and answer, so their KV cache is
reused. Concurrent requests with the same instruction share it while it is computed: all
but one wait for the common prefix. A prefix belongs to one version of the weights: other snapshots
never use it, and it is freed with its sampler.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from tinker_cookbook.engine.sampling.paged_cache import BlockTable, PagedCache
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.prefix_tree import common_prefix, token_bytes

SHORTEST = 16
"""Minimum length of an entry, and of a match."""


_TOKEN_BYTES = 8  # positions of images have large ids


@dataclass(eq=False)
class CachedPrefix:
    """Tokens [T] of one sampler whose keys and values are in ``table``."""

    owner: weakref.ref[Sampler]
    tokens: np.ndarray
    table: BlockTable
    key: bytes


@dataclass(eq=False)
class Prefill:
    """Prefill of one prompt; the samples of ``rows`` start when it is complete.

    It has no table until ``source`` has computed the first ``shared`` tokens; it then shares their
    blocks.
    """

    sampler: Sampler
    tokens: np.ndarray
    rows: list[SampledSequence]
    table: BlockTable | None = None
    source: CachedPrefix | Prefill | None = None
    shared: int = 0

    @cached_property
    def key(self) -> bytes:
        """Tokens as bytes, because comparing bytes is faster than comparing arrays."""
        return token_bytes(self.tokens)

    @cached_property
    def positions(self) -> np.ndarray | None:
        """Rotary positions [3, T]; ``None`` if they count the tokens."""
        return self.sampler.base.positions(self.tokens)

    @cached_property
    def last_seen(self) -> np.ndarray | None:
        """Last index [T] that each token sees; ``None`` if it is its own."""
        return self.sampler.base.last_seen(self.tokens)

    @property
    def left(self) -> int:
        """Number of tokens left to prefill."""
        return len(self.tokens) - (0 if self.table is None else self.table.length)

    @property
    def ready(self) -> bool:
        """Whether it has not started and the common prefix is computed."""
        if self.table is not None or self.source is None:
            return self.table is None
        return self.source.table is not None and self.source.table.length >= self.shared


_by_tokens = attrgetter("key")


def _neighbours(entries: list[CachedPrefix], key: bytes) -> list[CachedPrefix]:
    """Returns the sorted entries before and after the position of ``key``: no other one has a
    longer common prefix with it."""
    place = bisect_left(entries, key, key=_by_tokens)
    return entries[max(0, place - 1) : place + 1]


class PrefixCache:
    """Cached prefixes, at most ``budget`` tokens beyond running sequences, with LRU eviction."""

    def __init__(self, cache: PagedCache, budget: int) -> None:
        self._cache = cache
        self._budget = budget
        # Least recently used first. A dictionary, because moving an entry within a list is slow.
        self._entries: dict[CachedPrefix, None] = {}
        # By sampler, so that ``purge``, which each step calls, looks at no single entry. In the
        # order of their tokens; none is a prefix of another.
        self._sorted: dict[weakref.ref[Sampler], list[CachedPrefix]] = {}

    @property
    def spare(self) -> int:
        """Tokens that can be added before an entry is evicted."""
        return max(0, self._budget - self._cache.kept_tokens)

    def adopt(self, sampler: Sampler, tokens: np.ndarray, table: BlockTable) -> None:
        """Takes over ``table``, which holds the KV cache of the first of ``tokens``."""
        tokens = tokens[: table.length]
        key = token_bytes(tokens)
        owner = weakref.ref(sampler)
        prefixes = self._sorted.setdefault(owner, [])
        near = _neighbours(prefixes, key)
        # A prefix of another entry could never give a longer match than that entry.
        if len(tokens) < SHORTEST or any(entry.key.startswith(key) for entry in near):
            self._cache.free(table)
            return
        self._cache.keep(table)
        for entry in near:
            if key.startswith(entry.key):  # the new entry replaces its own prefix
                self._remove(entry)
        added = CachedPrefix(owner, tokens, table, key)
        self._entries[added] = None
        insort(prefixes, added, key=_by_tokens)
        self.trim(self._budget)

    def find(
        self, new: Prefill, running: Iterable[Prefill], worth_waiting: int
    ) -> tuple[CachedPrefix | Prefill | None, int]:
        """Returns the source of the longest common prefix with a prefill, and its length.

        A prefill in ``running`` is chosen only if it shares ``worth_waiting`` tokens more than any
        entry. At least one token is left to compute, because its hidden state is needed.
        """
        source: CachedPrefix | Prefill | None = None
        most = 0
        tokens, key = new.tokens[:-1], new.key[:-_TOKEN_BYTES]
        for entry in _neighbours(self._sorted.get(weakref.ref(new.sampler), []), key):
            shared = common_prefix(entry.tokens, tokens)
            if shared > max(most, SHORTEST - 1):
                source, most = entry, shared
        # To the end of the order, because eviction begins at the front.
        if isinstance(source, CachedPrefix):
            del self._entries[source]
            self._entries[source] = None
        # Waiting for a running prefill costs steps, so it must save enough tokens.
        enough = most + worth_waiting
        for prefill in running:
            # Most prefills differ early; comparing bytes first detects this at a fraction of the
            # cost.
            if (
                enough <= len(tokens)
                and prefill.sampler is new.sampler
                and prefill.key.startswith(key[: enough * _TOKEN_BYTES])
            ):
                source, most = prefill, common_prefix(prefill.tokens, tokens)
                enough = most + 1
        return source, most

    def purge(self) -> None:
        """Evicts entries whose samplers no longer exist."""
        for owner in [owner for owner in self._sorted if owner() is None]:
            for entry in self._sorted.pop(owner):
                del self._entries[entry]
                self._cache.free(entry.table)

    def trim(self, limit: int) -> None:
        """Evicts entries until they take at most ``limit`` tokens and the budget."""
        while self._entries and self._cache.kept_tokens > min(limit, self._budget):
            self._remove(next(iter(self._entries)))

    def _remove(self, entry: CachedPrefix) -> None:
        del self._entries[entry]
        prefixes = self._sorted[entry.owner]
        del prefixes[bisect_left(prefixes, entry.key, key=_by_tokens)]
        self._cache.free(entry.table)
