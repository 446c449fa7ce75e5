"""Asynchronous sampling: groups are started all the time, each with the newest weights.

At most ``groups_per_batch * (K + 1)`` groups are started and not yet trained, so that sampling goes
on while the policy trains, and yet runs no more than K updates ahead of training. Training takes
the groups of the oldest weights first. No finished group is discarded: one that takes long is
trained when it is done, even if it is then more than K updates old, because leaving such groups out
would train on quick problems more than on slow ones.

With ``stream_minibatch_config`` a part of the batch is trained as soon as so many groups are
finished, in the order in which they finish.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.rl.config import AsyncConfig, PolicyTrainingConfig
from tinker_cookbook.rl.loop.async_state import QueueState, read_queue, write_queue
from tinker_cookbook.rl.loop.rollout_worker import (
    PolicySnapshot,
    RolloutGroup,
    RolloutRequest,
    RolloutWorker,
    cancel_all,
)
from tinker_cookbook.rl.loop.sources import (
    Collected,
    Consume,
    GroupSource,
    Metrics,
    nothing_played,
    problem_batches,
)
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.supervised.prefetch import Prefetcher

logger = logging.getLogger(__name__)


class ProblemQueue:
    """The problems of a dataset one by one, from a place on, epoch after epoch.

    Args:
        dataset: Whose problems.
        seed: Of the order of the epochs.
        position: (batch, index) of the first problem to give.
        again: Problems before that place which were begun but not finished.
        stop_batch: Batch to stop before; ``None`` goes on with further epochs.
    """

    def __init__(
        self,
        dataset: RLDataset,
        seed: int,
        position: tuple[int, int] = (0, 0),
        again: Sequence[tuple[int, int]] = (),
        stop_batch: int | None = None,
    ) -> None:
        self.position = position
        self.again = set(again)
        """Those of ``again`` that have not been given yet."""
        self.epoch = 0
        """Of the problem given last."""
        first = min([position[0], *(place[0] for place in again)])
        batches = problem_batches(dataset, seed, first, stop_batch)
        self._rest: deque[RolloutRequest] = deque()
        self._ahead = Prefetcher(_from(batches, position, frozenset(again)))

    async def next(self) -> RolloutRequest:
        """The next problem; raises StopAsyncIteration after the last one."""
        while not self._rest:
            self._rest.extend(await self._ahead.next())
        problem = self._rest.popleft()
        self.epoch = problem.epoch
        if problem.place >= self.position:
            self.position = (problem.batch, problem.index + 1)
        self.again.discard(problem.place)
        return problem

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._ahead.close()


def _from(
    batches: Iterator[list[RolloutRequest]],
    position: tuple[int, int],
    again: frozenset[tuple[int, int]],
) -> Iterator[list[RolloutRequest]]:
    for problems in batches:
        yield [one for one in problems if one.place >= position or one.place in again]


class AsyncSource(GroupSource):
    """Groups of which at most ``max_steps_off_policy`` updates' worth are sampled ahead.

    Args:
        dataset: Its problems go round until the run has its updates: groups that fail are made up
            for by problems of a further epoch.
        player: Plays the groups.
        config: The run's.
        total_steps: Updates of the whole run.
        log_path: Where ``save`` has written, if the run is continued.
        start_step: Updates done.
        stop_batch: Read the dataset once, from batch ``start_step`` up to this one. Where its
            problems are used up, the last update trains the groups that are left.
        drop: Whether a finished group is left out of training; called once with each.
    """

    def __init__(
        self,
        dataset: RLDataset,
        player: RolloutWorker,
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
        self._player, self._drop = player, drop
        self._last_step = total_steps - 1
        self._once = stop_batch is not None
        state = QueueState((start_step, 0), [], [])
        if not self._once:
            state = _restored(log_path, start_step)
        self._problems = ProblemQueue(
            dataset, config.seed, state.position, state.in_flight, stop_batch
        )
        self._queue = list(state.queue)
        self._running: dict[
            asyncio.Task[RolloutGroup | None], tuple[RolloutRequest, PolicySnapshot]
        ] = {}
        self._taken = start_step * self._size
        self._wanted = total_steps * self._size
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
    ) -> Collected | None:
        """See :meth:`GroupSource.collect`."""
        self.renew(snapshot)
        self._player.begin(self._size, done=len(self._queue))
        self._current = []
        seconds = 0.0
        for _ in range(self._num_parts):
            await self._wait_for(self._size // self._num_parts, step)
            groups = self._take(self._size // self._num_parts)
            if not groups:
                break
            if self._once and step == self._last_step and len(self._current) == self._size:
                self._cancel_rest()  # nothing that still runs can be trained
            seconds = self._player.seconds
            await consume(groups)
        if not self._current:
            return None
        failed, self._failed = self._failed, 0
        return Collected(self._current, self._problems.epoch, failed, seconds, self._metrics())

    async def _wait_for(self, num_groups: int, step: int) -> None:
        """Waits until so many groups can be trained, or no more will come."""
        while True:
            if self._error is not None:
                raise self._error
            if self._failed_in_a_row >= self._size:
                raise nothing_played(step, self._failed_in_a_row)
            if len(self._queue) >= num_groups or (self._used_up and not self._running):
                return
            self._changed.clear()
            await self._changed.wait()

    def renew(self, snapshot: PolicySnapshot) -> None:
        """Groups are started with these weights from now on."""
        if self._newest is None or snapshot.step > self._newest.step:
            self._newest = snapshot
            self._in_training, self._current = 0, []
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed())
            self._feeder.add_done_callback(self._feeder_done)
        self._changed.set()

    def finished(self) -> list[RolloutGroup]:
        """See :meth:`GroupSource.finished`."""
        return [*self._current, *self._queue]

    def save(self, log_path: Path, step: int) -> None:
        """Writes the queue, the place in the data, and what was begun but not finished."""
        begun = [one.place for task, (one, _) in self._running.items() if not task.cancelling()]
        begun += self._problems.again
        write_queue(log_path, step, QueueState(self._problems.position, begun, self._queue))

    async def close(self) -> None:
        """Cancels what runs."""
        feeder = [self._feeder] if self._feeder is not None else []
        await cancel_all([*feeder, *self._running])
        await asyncio.to_thread(self._problems.close)

    def _take(self, size: int) -> list[RolloutGroup]:
        """Takes groups from the queue: the oldest, or in a streaming run the first to finish."""
        if not self._streams:
            self._queue.sort(key=lambda group: (group.sampling_step, group.batch, group.index))
        groups, self._queue = self._queue[:size], self._queue[size:]
        for place, group in enumerate(groups, len(self._current)):
            group.substep = place * self._num_substeps // self._size
        self._current += groups
        self._taken += len(groups)
        self._in_training += len(groups)
        return groups

    def _metrics(self) -> Metrics:
        return {
            "async/groups_queued": len(self._queue),
            "async/groups_in_flight": len(self._running),
        }

    def _has_room(self) -> bool:
        """Whether one more group may be started."""
        outstanding = len(self._running) + len(self._queue)
        # Enough for all updates that are left. With a dataset that is read once, groups that are
        # dropped or that never end must not keep the others from being started.
        if not self._once and self._taken + outstanding >= self._wanted:
            return False
        most = self._size * (self._config.max_steps_off_policy + 1)
        return outstanding + self._in_training < most

    async def _feed(self) -> None:
        """Starts groups whenever there is room."""
        while True:
            while not self._has_room():
                self._changed.clear()
                await self._changed.wait()
            problem = await self._problems.next()
            assert self._newest is not None
            task = asyncio.create_task(self._player.play(problem, self._newest))
            self._running[task] = (problem, self._newest)
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
                self._player.note(group)
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

    def _cancel_rest(self) -> None:
        """Cancels what runs, without waiting for its cleanup, which ``close`` does."""
        for task in filter(None, [self._feeder, *self._running]):
            task.cancel()


def _restored(log_path: Path, step: int) -> QueueState:
    """What ``save`` wrote after this update; where it wrote nothing, the data from there on."""
    state = read_queue(log_path, step)
    if state is not None:
        return state
    if step > 0:
        logger.warning(
            "no queue of groups was saved with the checkpoint after step %d (the run was not "
            "asynchronous then); the data go on with batch %d",
            step,
            step,
        )
    return QueueState((step, 0), [], [])
