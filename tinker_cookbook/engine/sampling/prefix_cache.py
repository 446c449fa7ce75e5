"""Prefix cache: KV caches of prompts and finished samples, kept for later requests.

The next turn of a conversation begins with the last turn's prompt and answer, so their KV cache is
reused. Requests with the same instruction that arrive at once share it while it is computed: all
but one wait for the common prefix. A prefix belongs to one version of the weights: other snapshots
never use it, and it is freed with its sampler.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tinker_cookbook.engine.sampling.paged_cache import BlockTable, PagedCache
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.prefix_tree import common_prefix

SHORTEST = 16
"""Minimum length of an entry, and of a match."""


@dataclass(eq=False)
class CachedPrefix:
    """Tokens [T] of one sampler whose keys and values are in ``table``."""

    owner: weakref.ref[Sampler]
    tokens: np.ndarray
    table: BlockTable


@dataclass(eq=False)
class Prefill:
    """Prefill of one prompt; the samples of ``rows`` start when it is complete.

    It has no table until ``source`` has computed the first ``shared`` tokens, which it then shares.
    """

    sampler: Sampler
    tokens: np.ndarray
    rows: list[SampledSequence]
    table: BlockTable | None = None
    source: CachedPrefix | Prefill | None = None
    shared: int = 0

    @property
    def left(self) -> int:
        """Number of tokens left to prefill."""
        return len(self.tokens) - (0 if self.table is None else self.table.length)

    @property
    def ready(self) -> bool:
        """Whether it has not begun, and the common prefix is computed."""
        if self.table is not None or self.source is None:
            return self.table is None
        return self.source.table is not None and self.source.table.length >= self.shared


class PrefixCache:
    """Cached prefixes, at most ``budget`` tokens beyond running sequences, with LRU eviction."""

    def __init__(self, cache: PagedCache, budget: int) -> None:
        self._cache = cache
        self._budget = budget
        self._entries: list[CachedPrefix] = []  # the least recently used first

    @property
    def spare(self) -> int:
        """Tokens that can be added before an entry is evicted."""
        return max(0, self._budget - self._cache.kept_tokens)

    def adopt(self, sampler: Sampler, tokens: np.ndarray, table: BlockTable) -> None:
        """Takes over ``table``, which holds the KV cache of the first of ``tokens``."""
        tokens = tokens[: table.length]
        mine = [entry for entry in self._entries if entry.owner() is sampler]
        shared = [common_prefix(entry.tokens, tokens) for entry in mine]
        # A prefix of another entry could never give a longer match than that entry.
        if len(tokens) < SHORTEST or len(tokens) in shared:  # short, or known already
            self._cache.free(table)
            return
        self._cache.keep(table)
        for entry, common in zip(mine, shared, strict=True):
            if common == len(entry.tokens):  # a prefix of the new entry
                self._remove(entry)
        self._entries.append(CachedPrefix(weakref.ref(sampler), tokens, table))
        self.trim(self._budget)

    def find(
        self, sampler: Sampler, tokens: np.ndarray, running: Iterable[Prefill], worth_waiting: int
    ) -> tuple[CachedPrefix | Prefill | None, int]:
        """Returns the source of the longest common prefix with ``tokens``, and its length.

        A prefill in ``running`` is chosen only if it shares ``worth_waiting`` tokens more than any
        entry. At least one token is left to compute, because its hidden state is needed.
        """
        source: CachedPrefix | Prefill | None = None
        most = 0
        for entry in self._entries:
            if entry.owner() is sampler:
                shared = common_prefix(entry.tokens, tokens[:-1])
                if shared > max(most, SHORTEST - 1):
                    source, most = entry, shared
        # To the end of the list, because eviction begins at the front.
        if isinstance(source, CachedPrefix):
            self._entries.remove(source)
            self._entries.append(source)
        # Waiting for a running prefill costs steps, so it must save more than it costs.
        enough = most + worth_waiting
        for prefill in running:
            if prefill.sampler is sampler:
                shared = common_prefix(prefill.tokens, tokens[:-1])
                if shared >= enough:
                    source, most, enough = prefill, shared, shared + 1
        return source, most

    def purge(self) -> None:
        """Evicts entries whose samplers no longer exist."""
        for entry in [entry for entry in self._entries if entry.owner() is None]:
            self._remove(entry)

    def trim(self, limit: int) -> None:
        """Evicts entries until they take at most ``limit`` tokens and the budget."""
        while self._entries and self._cache.kept_tokens > min(limit, self._budget):
            self._remove(self._entries[0])

    def _remove(self, entry: CachedPrefix) -> None:
        self._entries.remove(entry)
        self._cache.free(entry.table)
