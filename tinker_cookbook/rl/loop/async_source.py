"""Asynchronous sampling: groups start continuously, each with the newest weights.

At most ``groups_per_batch * (K + 1)`` groups are started and not yet trained, so sampling continues
while the policy trains, but is at most K updates ahead of training. Training takes the groups of
the oldest weights first; with ``stream_minibatch_config`` it takes parts of a batch in the order in
which groups finish. No finished group is discarded for its staleness: discarding slow groups would
bias training towards fast problems.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.rl.config import AsyncConfig, PolicyTrainingConfig
from tinker_cookbook.rl.loop.async_state import QueueState, read_queue, write_queue
from tinker_cookbook.rl.loop.sources import (
    Consume,
    GroupSource,
    Metrics,
    PolicySnapshot,
    RolloutBatch,
    RolloutGroup,
    RolloutWorker,
    all_failed,
    problem_batches,
)
from tinker_cookbook.rl.rollouts.async_utils import cancel_and_wait
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.supervised.prefetch import Prefetcher

logger = logging.getLogger(__name__)


class ProblemQueue:
    """Queue of the dataset's groups from ``position``, (batch, index), epoch after epoch.

    It begins with the earlier groups ``again``, which were started but not finished, and ends
    before ``stop_batch``, if that is set.
    """

    def __init__(
        self,
        dataset: RLDataset,
        seed: int,
        position: tuple[int, int] = (0, 0),
        again: Sequence[tuple[int, int]] = (),
        stop_batch: int | None = None,
    ) -> None:
        # The position moves on with every group, so a continued run starts where this one stopped.
        self.position = position
        self.again = set(again)
        """Groups of ``again`` that were not returned yet."""
        self.epoch = 0
        """Epoch of the last returned group."""
        self._rest: deque[RolloutGroup] = deque()
        # Start at the earliest batch that has an unfinished group.
        first = min([position[0], *(batch for batch, _ in again)])
        # A copy, because the prefetcher's thread reads it while ``next`` changes ``again``.
        unfinished = frozenset(again)
        self._prefetcher = Prefetcher(
            [group for group in batch if group.place >= position or group.place in unfinished]
            for batch in problem_batches(dataset, seed, first, stop_batch)
        )

    async def next(self) -> RolloutGroup:
        """Returns the next group; raises StopAsyncIteration after the last one."""
        while not self._rest:
            self._rest.extend(await self._prefetcher.next())
        group = self._rest.popleft()
        self.epoch = group.epoch
        if group.place >= self.position:
            self.position = (group.batch, group.index + 1)
        self.again.discard(group.place)
        return group

    def close(self) -> None:
        """Stops the prefetching thread."""
        self._prefetcher.close()


class AsyncSource(GroupSource):
    """Source that samples at most ``max_steps_off_policy`` updates ahead of training.

    The dataset is repeated until the run has ``total_steps`` updates; groups of a further epoch
    replace groups that fail. A run continued after ``start_step`` updates reads its queue from
    ``log_path``. With ``stop_batch`` the dataset is read once, from batch ``start_step`` up to this
    one, and the last update trains the remaining groups. ``drop`` returns whether a finished group
    is not trained; it is called once with each.
    """

    def __init__(
        self,
        dataset: RLDataset,
        worker: RolloutWorker,
        config: PolicyTrainingConfig,
        total_steps: int,
        log_path: Path,
        start_step: int = 0,
        *,
        stop_batch: int | None = None,
        drop: Callable[[RolloutGroup], bool] | None = None,
    ) -> None:
        assert config.async_config is not None
        self._config: AsyncConfig = config.async_config
        stream = config.stream_minibatch_config
        self._streams = stream is not None
        self._size = (stream or self._config).groups_per_batch
        self._num_substeps = config.num_substeps
        self._num_parts = 1 if stream is None else self._num_substeps * stream.num_minibatches
        self._worker, self._drop = worker, drop
        self._last_step = total_steps - 1
        self._once = stop_batch is not None
        state = None if self._once else read_queue(log_path, start_step)
        if state is None:
            state = QueueState((start_step, 0), [], [])
            if start_step > 0 and not self._once:
                logger.warning(
                    "no queue of groups was saved with the checkpoint after step %d (the run was "
                    "not asynchronous then); the data continue with batch %d",
                    start_step,
                    start_step,
                )
        self._problems = ProblemQueue(
            dataset, config.seed, state.position, state.in_flight, stop_batch
        )
        self._queue = list(state.queue)
        self._running: dict[asyncio.Task[RolloutGroup | None], RolloutGroup] = {}
        # Counts of groups: trained so far, and needed for the whole run.
        self._taken = start_step * self._size
        self._wanted = total_steps * self._size
        # Groups of the current update, which count as untrained until its weights arrive.
        self._in_training = 0
        self._failed = self._failed_in_a_row = 0
        self._current: list[RolloutGroup] = []
        self._used_up = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._newest: PolicySnapshot | None = None
        self._feeder: asyncio.Task[None] | None = None

    async def collect(
        self, step: int, snapshot: PolicySnapshot, consume: Consume
    ) -> RolloutBatch | None:
        """Returns finished groups, the oldest first; see :meth:`GroupSource.collect`."""
        self.update_weights(snapshot)
        self._worker.begin(self._size, done=len(self._queue))
        self._current = []
        seconds = 0.0
        size = self._size // self._num_parts
        # A run without streaming has one part: the whole batch.
        for _ in range(self._num_parts):
            await self._wait_for(size, step)
            # Take the oldest groups, or in a streaming run those that finished first.
            if not self._streams:
                self._queue.sort(key=lambda group: (group.sampling_step, group.batch, group.index))
            groups, self._queue = self._queue[:size], self._queue[size:]
            if not groups:
                break
            for index, group in enumerate(groups, len(self._current)):
                group.substep = index * self._num_substeps // self._size
            self._current += groups
            self._taken += len(groups)
            self._in_training += len(groups)
            # After the last update nothing that still runs can be trained. ``close`` waits for it.
            if self._once and step == self._last_step and len(self._current) == self._size:
                for task in filter(None, [self._feeder, *self._running]):
                    task.cancel()
            seconds = self._worker.seconds
            await consume(groups)
        if not self._current:
            return None
        failed, self._failed = self._failed, 0
        metrics: Metrics = {
            "async/groups_queued": len(self._queue),
            "async/groups_in_flight": len(self._running),
        }
        return RolloutBatch(self._current, self._problems.epoch, failed, seconds, metrics)

    async def _wait_for(self, num_groups: int, step: int) -> None:
        """Waits until ``num_groups`` groups are finished, or no more will finish."""
        while True:
            if self._error is not None:
                raise self._error
            # A whole batch of failures in a row means that nothing will succeed.
            if self._failed_in_a_row >= self._size:
                raise all_failed(step, self._failed_in_a_row)
            if len(self._queue) >= num_groups or (self._used_up and not self._running):
                return
            self._changed.clear()
            await self._changed.wait()

    def update_weights(self, snapshot: PolicySnapshot) -> None:
        """Starts further groups with these weights."""
        # ``collect`` repeats the snapshot that the loop has passed before.
        if self._newest is None or snapshot.step > self._newest.step:
            self._newest = snapshot
            self._in_training, self._current = 0, []
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed())
            self._feeder.add_done_callback(self._feeder_done)
        self._changed.set()

    def finished(self) -> list[RolloutGroup]:
        """Returns the groups of this iteration, and those that wait for the next ones."""
        return [*self._current, *self._queue]

    def save(self, log_path: Path, step: int) -> None:
        """Saves the queue, the position in the data, and the unfinished groups."""
        begun = [group.place for task, group in self._running.items() if not task.cancelling()]
        begun += self._problems.again
        write_queue(log_path, step, QueueState(self._problems.position, begun, self._queue))

    async def close(self) -> None:
        """Cancels running groups and waits for their cleanup."""
        feeder = [self._feeder] if self._feeder is not None else []
        await cancel_and_wait([*feeder, *self._running])
        await asyncio.to_thread(self._problems.close)

    async def _feed(self) -> None:
        """Starts groups while the limit on untrained groups allows it."""
        # Sampling may be K updates ahead of the batch of the next update.
        most = self._size * (self._config.max_steps_off_policy + 1)
        while True:
            outstanding = len(self._running) + len(self._queue)
            # Start no more groups than the remaining updates need. With a dataset that is read
            # once, groups that are dropped or never end must not prevent others from starting.
            enough = not self._once and self._taken + outstanding >= self._wanted
            if enough or outstanding + self._in_training >= most:
                self._changed.clear()
                await self._changed.wait()
                continue
            group = await self._problems.next()
            assert self._newest is not None
            task = asyncio.create_task(self._worker.run_group(group, self._newest))
            self._running[task] = group
            task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[RolloutGroup | None]) -> None:
        del self._running[task]
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._error = self._error or error
            elif (group := task.result()) is None:
                self._failed += 1
                self._failed_in_a_row += 1
            else:
                self._failed_in_a_row = 0
                if self._drop is None or not self._drop(group):
                    self._queue.append(group)
                self._worker.count(group)
        self._changed.set()

    def _feeder_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if self._once and isinstance(error, StopAsyncIteration):
            self._used_up = True
        else:
            self._error = error or TrainingError("the dataset has no problems left")
        self._changed.set()
