"""Where an iteration's groups come from: problems of the dataset, played by the policy.

A source hands finished groups to ``consume``, which submits their training. How soon, and which
weights may have sampled them, is what the three modes of training differ in; everything else is
the same loop:

- ``BatchSource``, synchronous: the whole batch, once it is complete
- ``BatchSource`` with ``num_minibatches``, streaming: parts of the batch as soon as they are
- ``AsyncSource`` (``async_source.py``): groups that may be up to K updates old
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tinker_cookbook.exceptions import AllTrajectoriesFailedError, DataValidationError
from tinker_cookbook.rl.loop.rollout_worker import (
    PolicySnapshot,
    RolloutGroup,
    RolloutRequest,
    RolloutWorker,
)
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.supervised.prefetch import Prefetcher

Consume = Callable[[Sequence[RolloutGroup]], Awaitable[None]]
Metrics = dict[str, float | int | str]


def problem_batches(
    dataset: RLDataset, seed: int, start: int, stop: int | None = None
) -> Iterator[list[RolloutRequest]]:
    """The batches ``start`` to ``stop``, counted on over epochs, each epoch in its own order.

    Runs in a thread of its own (``Prefetcher``), as datasets tokenise.

    Raises:
        DataValidationError: A batch is empty.
    """
    epoch = None
    for number in range(start, stop) if stop is not None else _count(start):
        if number // len(dataset) != epoch:
            epoch = number // len(dataset)
            dataset.set_epoch(seed + epoch)
        builders = dataset.get_batch(number % len(dataset))
        if not builders:
            raise DataValidationError(
                f"batch {number % len(dataset)} of {type(dataset).__name__} is empty, expected at "
                "least one EnvGroupBuilder; check its __len__"
            )
        yield [RolloutRequest(number, i, builder, epoch or 0) for i, builder in enumerate(builders)]


def _count(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1


@dataclass
class Collected:
    """What a source gave for one iteration.

    Attributes:
        groups: The groups that were trained, in the order of the batch.
        epoch: That their problems come from.
        num_failed: Groups left out because none of their episodes could be played.
        sampling_seconds: How long training waited for the last of them.
        metrics: The source's own.
    """

    groups: list[RolloutGroup]
    epoch: int
    num_failed: int
    sampling_seconds: float
    metrics: Metrics


class GroupSource(ABC):
    """Gives the groups of one iteration after the other. Use it in ``async with``."""

    @abstractmethod
    async def collect(
        self, step: int, snapshot: PolicySnapshot, consume: Consume
    ) -> Collected | None:
        """The groups that update number ``step`` (from 0) trains; ``None``: none are left.

        Args:
            step: Updates finished.
            snapshot: The weights after them.
            consume: Called with groups that can be trained, one part after the other.

        Raises:
            AllTrajectoriesFailedError: Not one group could be played.
        """

    def renew(self, snapshot: PolicySnapshot) -> None:
        """Tells of new weights, as soon as they are there."""

    @abstractmethod
    def finished(self) -> list[RolloutGroup]:
        """Groups of this iteration that are finished, trained or not."""

    def save(self, log_path: Path, step: int) -> None:
        """Writes what a run continued after update ``step`` needs from here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops what still runs."""


class BatchSource(GroupSource):
    """The dataset's batches, one each iteration, all sampled with the newest weights.

    Args:
        batches: From the first iteration on.
        player: Plays the groups.
        num_substeps: Optimizer steps a batch is split into, contiguous groups each.
        num_minibatches: Parts of a substep that are handed on as soon as they are complete;
            0 hands on the whole batch at its end. The parts hold whatever groups are done first, so
            the sum of their gradients is that of the whole batch up to rounding.
    """

    def __init__(
        self,
        batches: Iterator[list[RolloutRequest]],
        player: RolloutWorker,
        num_substeps: int = 1,
        num_minibatches: int = 0,
    ) -> None:
        self._ahead = Prefetcher(batches)
        self._player = player
        self._num_substeps = num_substeps
        self._num_minibatches = num_minibatches

    async def collect(self, step: int, snapshot: PolicySnapshot, consume: Consume) -> Collected:
        """See :meth:`GroupSource.collect`."""
        problems = await self._ahead.next()
        groups: list[RolloutGroup] = []
        parts = _Parts(len(problems), self._num_substeps, self._num_minibatches)
        self._player.begin(len(problems))

        async def take(index: int, group: RolloutGroup | None) -> None:
            if group is not None:
                group.substep = parts.substep(index)
                groups.append(group)
            for part in parts.add(index, group):
                await consume(part)

        await self._player.run_groups(problems, snapshot, take)
        if not groups:
            raise nothing_played(step, len(problems))
        groups.sort(key=lambda group: group.index)
        seconds = self._player.seconds
        if not self._num_minibatches:
            await consume(groups)
        failed = len(problems) - len(groups)
        return Collected(groups, problems[0].epoch, failed, seconds, {})

    def finished(self) -> list[RolloutGroup]:
        """See :meth:`GroupSource.finished`."""
        return sorted(self._player.groups, key=lambda group: group.index)

    async def close(self) -> None:
        """See :meth:`GroupSource.close`."""
        await asyncio.to_thread(self._ahead.close)


class _Parts:
    """Which finished groups can be handed on: of the present substep, a part at a time."""

    def __init__(self, num_groups: int, num_substeps: int, num_minibatches: int) -> None:
        self._streams = num_minibatches > 0
        self._num_groups, self._num_substeps = num_groups, num_substeps
        of_substep = [
            sum(self.substep(i) == number for i in range(num_groups))
            for number in range(num_substeps)
        ]
        self._left = of_substep
        self._size = -(-num_groups // (num_substeps * max(num_minibatches, 1)))
        self._ready: list[list[RolloutGroup]] = [[] for _ in range(num_substeps)]
        self._present = 0

    def substep(self, index: int) -> int:
        """The substep that trains the group at this place in the batch."""
        return index * self._num_substeps // self._num_groups

    def add(self, index: int, group: RolloutGroup | None) -> Iterator[list[RolloutGroup]]:
        """Takes a finished group (None: it failed); gives the parts that are complete now."""
        number = self.substep(index)
        self._left[number] -= 1
        if group is not None:
            self._ready[number].append(group)
        if self._streams:
            yield from self._complete()

    def _complete(self) -> Iterator[list[RolloutGroup]]:
        while self._present < self._num_substeps:
            ready = self._ready[self._present]
            while len(ready) >= self._size or (ready and not self._left[self._present]):
                part = sorted(ready[: self._size], key=lambda group: group.index)
                del ready[: self._size]
                yield part
            if self._left[self._present]:
                return
            self._present += 1


def nothing_played(step: int, num_groups: int) -> AllTrajectoriesFailedError:
    """The error where an iteration has no group to train."""
    return AllTrajectoriesFailedError(
        f"step {step + 1}: not one of {num_groups} groups could be played, so the environments or "
        "what they depend on are broken; see the warnings above in logs.log, mend it, and continue "
        "the run"
    )
