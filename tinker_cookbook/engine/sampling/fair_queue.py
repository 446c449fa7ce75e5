"""Fair queue of the samples that wait for a row of the batch.

An owner is a key of the server, or a sampler if no owner is given. The next free row goes to the
owner with the fewest running sequences, and within an owner to the sampler with the fewest.
Requests of one sampler keep their order. So a request of 1,024 samples does not delay the first
sample of another owner.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tinker_cookbook.engine.sampling.requests import SampledSequence, SampleRequest, ScoreRequest
from tinker_cookbook.engine.sampling.sampler import Sampler


@dataclass(eq=False)
class WaitingRequest:
    """Waiting samples of one request: not started, or preempted after ``tokens`` [T]."""

    request: SampleRequest
    tokens: np.ndarray
    rows: deque[SampledSequence] = field(default_factory=deque)

    @classmethod
    def of(cls, row: SampledSequence) -> WaitingRequest:
        """Returns the entry of a preempted sample, which continues after its sampled tokens."""
        return cls(row.request, row.tokens, deque([row]))

    @property
    def sampler(self) -> Sampler:
        """Returns the sampler of the request."""
        return self.request.sampler


QueueKey: TypeAlias = tuple[Hashable, Sampler]
"""An owner and one of its samplers."""


def owner_of(request: SampleRequest | ScoreRequest) -> Hashable:
    """Returns the owner for the fair share."""
    sampler = request.sampler
    return sampler if sampler.owner is None else sampler.owner


class Shares:
    """Numbers of running sequences: ``owners`` of each owner, ``runs`` of each of its samplers."""

    def __init__(self, rows: Iterable[SampledSequence]) -> None:
        self.total = 0
        self.owners: Counter[Hashable] = Counter()
        self.runs: Counter[QueueKey] = Counter()
        for row in rows:
            self.add(row.request)

    def add(self, request: SampleRequest, count: int = 1) -> None:
        """Adds ``count`` (may be negative) to the numbers of the request's owner and sampler."""
        owner = owner_of(request)
        self.total += count
        self.owners[owner] += count
        self.runs[owner, request.sampler] += count

    def largest(self, owner: Hashable | None = None) -> QueueKey:
        """Returns ``owner``, or the one with most sequences, and its sampler with most."""
        if owner is None:
            owner = max(self.owners, key=self.owners.__getitem__)
        return max((run for run in self.runs if run[0] == owner), key=self.runs.__getitem__)

    def preemptible_for(self, request: SampleRequest) -> QueueKey | None:
        """Returns the owner and sampler that may be preempted for ``request``.

        The other must still have at least as many sequences afterwards, so that two owners
        do not preempt each other in turns.
        """
        if not self.total:
            return None
        # Between owners first, then between the samplers of one owner.
        mine = owner_of(request)
        key = self.largest()
        if self.owners[key[0]] - self.owners[mine] >= 2:
            return key
        if self.owners[mine]:
            key = self.largest(mine)
            if self.runs[key] - self.runs[mine, request.sampler] >= 2:
                return key
        return None


class FairQueue:
    """Waiting requests, by owner and by sampler. Any thread may read ``num_samples``."""

    def __init__(self) -> None:
        self.num_samples = 0
        # Owners in the order of their last service, which breaks ties between equal shares.
        self._owners: dict[Hashable, dict[Sampler, deque[WaitingRequest]]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __iter__(self) -> Iterator[WaitingRequest]:
        for runs in self._owners.values():
            for queue in runs.values():
                yield from queue

    def add(self, waiting: WaitingRequest, *, first: bool = False) -> None:
        """Appends the entry to the sampler's queue, or prepends it."""
        self.num_samples += len(waiting.rows)
        runs = self._owners.setdefault(owner_of(waiting.request), {})
        queue = runs.setdefault(waiting.sampler, deque())
        if first:
            queue.appendleft(waiting)
        else:
            queue.append(waiting)

    def in_turn(self, shares: Shares) -> list[WaitingRequest]:
        """Returns the first request of each sampler, samplers with the fewest sequences first."""
        heads = [
            (shares.owners[owner], shares.runs[owner, run], queue[0])
            for owner, runs in self._owners.items()
            for run, queue in runs.items()
        ]
        heads.sort(key=lambda head: head[:2])  # stable sort: ties go to the least recently served
        return [waiting for _, _, waiting in heads]

    @property
    def contested(self) -> bool:
        """Whether more than one sampler has waiting requests."""
        return sum(len(runs) for runs in self._owners.values()) > 1

    def take(self, waiting: WaitingRequest, count: int) -> list[SampledSequence]:
        """Removes ``count`` samples of a request that is first in its sampler's queue."""
        # Owner and sampler are inserted again at the end: they were served last.
        rows = [waiting.rows.popleft() for _ in range(count)]
        self.num_samples -= count
        if (stats := waiting.request.stats).started_at is None:
            stats.started_at = time.monotonic()
        owner = owner_of(waiting.request)
        runs = self._owners.pop(owner)
        queue = runs.pop(waiting.sampler)
        if not waiting.rows:
            queue.popleft()
        if queue:
            runs[waiting.sampler] = queue
        if runs:
            self._owners[owner] = runs
        return rows

    def drop_done(self) -> None:
        """Removes requests that were cancelled or have failed."""
        kept = [waiting for waiting in self if not waiting.request.future.done()]
        if len(kept) == sum(1 for _ in self):
            return
        # Rebuild in the same order, so that each keeps its turn.
        self._owners, self.num_samples = {}, 0
        for waiting in kept:
            self.add(waiting)
