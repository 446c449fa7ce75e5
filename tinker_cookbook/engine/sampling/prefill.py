"""Prefill of prompts, with common prefixes computed once.

Many requests with the same long instruction may arrive at once. One of them (the leader) prefills
the common prefix; the others (followers) wait, copy it, and prefill only the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tinker_cookbook.engine.sampling.kv_cache import KVSlot
from tinker_cookbook.engine.sampling.requests import SampledSequence
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.training.prefix_tree import common_prefix


@dataclass(eq=False)
class PrefillRequest:
    """Prefill of one prompt into ``slot``; the samples of ``rows`` start when it is complete.

    Without a slot it waits until ``leader`` has computed the first ``shared`` tokens, which both
    prompts have in common.
    """

    sampler: Sampler
    tokens: np.ndarray
    rows: list[SampledSequence]
    slot: KVSlot | None = None
    leader: PrefillRequest | None = None
    shared: int = 0

    @property
    def held(self) -> int:
        """Number of tokens that have, or will have, memory."""
        return len(self.tokens) if self.slot is None else self.slot.capacity

    @property
    def left(self) -> int:
        """Number of tokens left to prefill."""
        return len(self.tokens) - (0 if self.slot is None else self.slot.length)

    @property
    def may_begin(self) -> bool:
        """Whether the leader has computed the common prefix."""
        if self.slot is not None or self.leader is None or self.leader.slot is None:
            return False
        return self.leader.slot.length >= self.shared

    def joins(self, sampler: Sampler, tokens: np.ndarray) -> bool:
        """Returns whether this is the prefill of exactly this prompt."""
        return self.sampler is sampler and np.array_equal(self.tokens, tokens)

    def follow(self, others: Iterable[PrefillRequest], least: int) -> None:
        """Chooses as leader the first of ``others`` with the longest common prefix of at least
        ``least`` tokens."""
        self.leader, self.shared = None, max(0, least - 1)
        for other in others:
            if other.sampler is self.sampler:
                # One token at least is left to be computed: its hidden state is needed.
                shared = common_prefix(other.tokens, self.tokens[:-1])
                if shared > self.shared:
                    self.leader, self.shared = other, shared
