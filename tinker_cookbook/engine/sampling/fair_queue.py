"""Samples that wait for a place in the batch, and whose turn it is.

An owner is who shares the engine with others: that of a server's key, or a sampler by itself where
none is named. The next place goes to the owner that holds the fewest, and among an owner's
samplers to the one that holds the fewest; the requests of a sampler keep their order. So a request
of 1,024 samples delays no other owner's first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tinker_cookbook.engine.sampling.requests import SampledSequence, SampleRequest
from tinker_cookbook.engine.sampling.sampler import Sampler


@dataclass(eq=False)
class Waiting:
    """Samples of one request that have not begun, or continue later, after ``tokens`` [T]."""

    request: SampleRequest
    tokens: np.ndarray
    rows: deque[SampledSequence] = field(default_factory=deque)

    @classmethod
    def of(cls, row: SampledSequence) -> Waiting:
        """One sample that is to continue after what was drawn of it."""
        return cls(row.request, row.tokens, deque([row]))

    @property
    def sampler(self) -> Sampler:
        """The weights it is sampled from."""
        return self.request.sampler


Place: TypeAlias = tuple[Hashable, Sampler]
"""An owner and one of its samplers."""


def owner_of(request: SampleRequest) -> Hashable:
    """Who is to get a fair share of the batch."""
    sampler = request.sampler
    return sampler if sampler.owner is None else sampler.owner


class Shares:
    """How many places of the batch each owner, and each of its samplers, holds."""

    def __init__(self, rows: Iterable[SampledSequence]) -> None:
        self.total = 0
        self._owners: Counter[Hashable] = Counter()
        self._runs: Counter[Place] = Counter()
        for row in rows:
            self.add(row.request)

    def add(self, request: SampleRequest, places: int = 1) -> None:
        """Counts ``places`` more (or fewer, if negative) for the request's owner."""
        owner = owner_of(request)
        self.total += places
        self._owners[owner] += places
        self._runs[owner, request.sampler] += places

    def of_owner(self, owner: Hashable) -> int:
        """Places that an owner holds."""
        return self._owners[owner]

    def of_run(self, owner: Hashable, sampler: Sampler) -> int:
        """Places that one of its samplers holds."""
        return self._runs[owner, sampler]

    def largest(self) -> Place:
        """The owner with the most places, and its sampler with the most."""
        return self._largest_run(max(self._owners, key=self._owners.__getitem__))

    def gives_way_to(self, request: SampleRequest) -> Place | None:
        """Owner and sampler from which a place may be taken for ``request``.

        Only where the other still holds at least as many afterwards: no place goes back and forth.
        """
        if not self.total:
            return None
        mine = owner_of(request)
        owner, run = self.largest()
        if self._owners[owner] - self._owners[mine] >= 2:
            return owner, run
        if self._owners[mine]:
            _, run = self._largest_run(mine)
            if self._runs[mine, run] - self._runs[mine, request.sampler] >= 2:
                return mine, run
        return None

    def _largest_run(self, owner: Hashable) -> Place:
        return max((run for run in self._runs if run[0] == owner), key=self._runs.__getitem__)


class FairQueue:
    """What waits, by owner and by sampler."""

    def __init__(self) -> None:
        # Who was served last stands last: it decides between those that hold equally many places.
        self._owners: dict[Hashable, dict[Sampler, deque[Waiting]]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __iter__(self) -> Iterator[Waiting]:
        for runs in self._owners.values():
            for queue in runs.values():
                yield from queue

    def add(self, waiting: Waiting, *, first: bool = False) -> None:
        """Puts it behind, or before, what waits for the same sampler."""
        runs = self._owners.setdefault(owner_of(waiting.request), {})
        queue = runs.setdefault(waiting.sampler, deque())
        if first:
            queue.appendleft(waiting)
        else:
            queue.append(waiting)

    def in_turn(self, shares: Shares) -> list[Waiting]:
        """The first of each sampler's requests, those that hold the fewest places first."""
        heads = [
            (shares.of_owner(owner), shares.of_run(owner, run), queue[0])
            for owner, runs in self._owners.items()
            for run, queue in runs.items()
        ]
        heads.sort(key=lambda head: head[:2])  # stable: else who was served longest ago
        return [waiting for _, _, waiting in heads]

    @property
    def contested(self) -> bool:
        """Whether more than one sampler waits for places."""
        return sum(len(runs) for runs in self._owners.values()) > 1

    def take(self, waiting: Waiting, count: int) -> list[SampledSequence]:
        """Removes ``count`` rows of a request that is the first of its sampler."""
        rows = [waiting.rows.popleft() for _ in range(count)]
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
        """Removes the requests that were cancelled or have failed."""
        kept = [waiting for waiting in self if not waiting.request.future.done()]
        if len(kept) == sum(1 for _ in self):
            return
        self._owners = {}
        for waiting in kept:
            self.add(waiting)
