"""Prompts on their way into the cache, and which of them wait for another that begins alike.

A hundred requests with the same long instruction may come at once. Each reads for itself only what
the ones before it do not: it waits until the first has read what they have in common, and takes a
copy of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tinker_cookbook.engine.sampling.kv_cache import AnySlot
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.prefix_tree import common_prefix


@dataclass(eq=False)
class PrefillRequest:
    """A prompt on its way into ``slot``; the samples of ``rows`` begin once it is read.

    Without a slot it waits until ``leader`` has read the first ``shared`` tokens, which are its
    own first ones too.
    """

    sampler: Sampler
    tokens: np.ndarray
    rows: list[SampledSequence]
    slot: AnySlot | None = None
    leader: PrefillRequest | None = None
    shared: int = 0

    @property
    def held(self) -> int:
        """Tokens that it has, or will have, memory for."""
        return len(self.tokens) if self.slot is None else self.slot.capacity

    @property
    def left(self) -> int:
        """Tokens that are yet to be read."""
        return len(self.tokens) - (0 if self.slot is None else self.slot.length)

    @property
    def may_begin(self) -> bool:
        """Whether what it waited for is there."""
        if self.slot is not None or self.leader is None or self.leader.slot is None:
            return False
        return self.leader.slot.length >= self.shared

    def joins(self, sampler: Sampler, tokens: np.ndarray) -> bool:
        """Whether it is the very prompt that is asked for."""
        return self.sampler is sampler and np.array_equal(self.tokens, tokens)

    def follow(self, others: Iterable[PrefillRequest], least: int) -> None:
        """Takes for leader the first of ``others`` that shares most, if that is ``least``."""
        self.leader, self.shared = None, max(0, least - 1)
        for other in others:
            if other.sampler is self.sampler:
                # One token at least is left to be computed: its hidden state is needed.
                shared = common_prefix(other.tokens, self.tokens[:-1])
                if shared > self.shared:
                    self.leader, self.shared = other, shared
