"""Asynchronous sampling: groups start continuously, each with the newest weights.

At most ``groups_per_batch * (K + 1)`` groups are started and not yet trained, so sampling continues
while the policy trains, but is at most K updates ahead of training. Training takes the groups of
the oldest weights first; with ``stream_minibatch_config`` it uses parts of a batch in the order in
which groups finish. A slow group may be more than K updates old when it is done. By default it is
discarded, which holds the bound but favours fast problems; ``stale_groups="train"`` uses it.

Groups that are not trained yet are saved with each checkpoint: ``async_queue_NNNNNN.jsonl`` in the
run's folder belongs to the checkpoint after step N. Its first line has the position in the data,
each following line one finished group. It is complete before the checkpoint is listed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.checkpoint_utils import load_checkpoints_file
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import CheckpointError, TrainingError
from tinker_cookbook.rl.config import AsyncConfig, Config
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
from tinker_cookbook.rl.types import (
    RLDataset,
    RolloutError,
    Trajectory,
    TrajectoryGroup,
    Transition,
    as_stop_reason,
)
from tinker_cookbook.run.jsonl import NONFINITE_KEY, encode_row, read_rows
from tinker_cookbook.run.paths import write_atomically
from tinker_cookbook.supervised.prefetch import Prefetcher
from tinker_cookbook.utils.imports import tinker

logger = logging.getLogger(__name__)

_VERSION = 1


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
            [group for group in batch if group.position >= position or group.position in unfinished]
            for batch in problem_batches(dataset, seed, first, stop_batch)
        )

    async def next(self) -> RolloutGroup:
        """Returns the next group; raises StopAsyncIteration after the last one."""
        while not self._rest:
            self._rest.extend(await self._prefetcher.next())
        group = self._rest.popleft()
        self.epoch = group.epoch
        if group.position >= self.position:
            self.position = (group.batch, group.index + 1)
        self.again.discard(group.position)
        return group

    def close(self) -> None:
        """Stops the prefetching thread."""
        self._prefetcher.close()


class AsyncSource(GroupSource):
    """Source that samples at most ``max_steps_off_policy`` updates ahead of training.

    The dataset is repeated until the run has ``total_steps`` updates. A run continued after
    ``start_step`` updates reads its queue from ``log_path``. With ``stop_batch`` the dataset is
    read once, from batch ``start_step`` up to this one, and the last update trains the remaining
    groups. ``drop`` returns whether a finished group is not trained; it is called once with each.
    ``stale_groups`` applies if the config leaves it open.
    """

    def __init__(
        self,
        dataset: RLDataset,
        worker: RolloutWorker,
        config: Config,
        total_steps: int,
        log_path: Path,
        start_step: int = 0,
        *,
        stop_batch: int | None = None,
        drop: Callable[[RolloutGroup], bool] | None = None,
        stale_groups: str = "discard",
    ) -> None:
        assert config.async_config is not None
        self._config: AsyncConfig = config.async_config
        stream = config.stream_minibatch_config
        self._streams = stream is not None
        # Groups of an update.
        self._size = (stream or self._config).groups_per_batch
        self._num_substeps = config.num_substeps
        self._num_parts = 1 if stream is None else self._num_substeps * stream.num_minibatches
        self._worker, self._drop = worker, drop
        self._discards = (self._config.stale_groups or stale_groups) == "discard"
        self._discarded = 0
        self._last_step = total_steps - 1
        self._once = stop_batch is not None
        # A continued run trains the saved groups first, and runs the unfinished ones again.
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
        # Groups of the current update, which count as untrained until its weights arrive: otherwise
        # sampling would be one update further ahead while the update runs.
        self._in_training = 0
        self._failed = self._failed_in_a_row = 0
        self._current: list[RolloutGroup] = []
        # Set by background tasks, which wake ``collect`` by ``_changed``.
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
        # Groups left in the queue by earlier iterations are already finished.
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
            # Only at the end of a dataset that is read once.
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
            # Sampling continues while ``consume`` submits the training.
            seconds = self._worker.seconds
            await consume(groups)
        if not self._current:
            return None
        # Failed groups count for the update during whose sampling they failed.
        failed, self._failed = self._failed, 0
        discarded, self._discarded = self._discarded, 0
        metrics: Metrics = {
            "async/groups_discarded": discarded,
            "async/groups_queued": len(self._queue),
            "async/groups_in_flight": len(self._running),
        }
        errors = self._worker.take_errors()
        return RolloutBatch(self._current, self._problems.epoch, failed, seconds, metrics, errors)

    async def _wait_for(self, num_groups: int, step: int) -> None:
        """Waits until ``num_groups`` groups are finished, or no more will finish."""
        while True:
            # Background tasks cannot raise into the loop, so raise their error here.
            if self._error is not None:
                raise self._error
            # A whole batch of failures in a row means that nothing will succeed.
            if self._failed_in_a_row >= self._size:
                raise all_failed(step, self._failed_in_a_row, self._worker.take_errors())
            if self._discards:
                self._discard_stale(step)
            # At the end of the data the last update trains what is left.
            if len(self._queue) >= num_groups or (self._used_up and not self._running):
                return
            self._changed.clear()
            await self._changed.wait()

    def _discard_stale(self, step: int) -> None:
        """Removes groups that are too old for the update after ``step`` updates."""
        oldest = step - self._config.max_steps_off_policy
        kept = [group for group in self._queue if group.sampling_step >= oldest]
        if len(kept) < len(self._queue):
            self._discarded += len(self._queue) - len(kept)
            self._queue = kept
            self._changed.set()  # wakes the feeder, which starts others in their place

    def update_weights(self, snapshot: PolicySnapshot) -> None:
        """Starts more groups with these weights."""
        # The loop passes new weights before it reports the step, so that sampling does not wait;
        # ``collect`` then gets the same snapshot again.
        if self._newest is None or snapshot.step > self._newest.step:
            self._newest = snapshot
            # The trained groups no longer count, so the feeder may start others with these weights.
            self._in_training, self._current = 0, []
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed())
        self._changed.set()

    def finished(self) -> list[RolloutGroup]:
        """Returns the groups of this iteration, and those that wait for the next ones."""
        return [*self._current, *self._queue]

    def save(self, log_path: Path, step: int) -> None:
        """Saves the queue, the position in the data, and the unfinished groups."""
        # A group that was cancelled after the last update does not have to run again.
        begun = [group.position for task, group in self._running.items() if not task.cancelling()]
        # Groups of the last process that have not started again yet.
        begun += self._problems.again
        write_queue(log_path, step, QueueState(self._problems.position, begun, self._queue))

    async def close(self) -> None:
        """Cancels running groups and waits for their cleanup."""
        await cancel_and_wait(filter(None, [self._feeder, *self._running]))
        await asyncio.to_thread(self._problems.close)

    async def _feed(self) -> None:
        """Starts groups while the limit on untrained groups allows it."""
        # Sampling may be K updates ahead of the batch of the next update.
        most = self._size * (self._config.max_steps_off_policy + 1)
        try:
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
                # A group keeps its weights, even if newer ones arrive while it runs.
                task = asyncio.create_task(self._worker.run_group(group, self._newest))
                self._running[task] = group
                task.add_done_callback(self._group_done)
        except StopAsyncIteration:  # after the last group of a dataset that is read once
            self._used_up = True
        except Exception as error:
            self._error = error
        self._changed.set()

    def _group_done(self, task: asyncio.Task[RolloutGroup | None]) -> None:
        del self._running[task]
        if not task.cancelled():
            if (error := task.exception()) is not None:
                # Later errors are often consequences of the first.
                self._error = self._error or error
            elif (group := task.result()) is None:
                self._failed += 1
                # Reset by each success: single failures are tolerated, a broken environment is not.
                self._failed_in_a_row += 1
            else:
                self._failed_in_a_row = 0
                # A dropped group makes room for another one.
                if self._drop is None or not self._drop(group):
                    self._queue.append(group)
                self._worker.count(group)
        self._changed.set()


@dataclass
class QueueState:
    """State from which an asynchronous run continues."""

    position: tuple[int, int]
    """(batch, index) of the first group that was not started; batches count over epochs."""
    in_flight: Sequence[tuple[int, int]]
    """Earlier groups that were started but not finished; they run again."""
    queue: Sequence[RolloutGroup]
    """Finished groups that were not trained yet."""


def write_queue(log_path: Path, step: int, state: QueueState) -> None:
    """Writes the state after ``step`` updates, and removes files of deleted checkpoints."""
    head = {
        "version": _VERSION,
        "step": step,
        "position": list(state.position),
        "in_flight": sorted(map(list, state.in_flight)),
        "num_groups": len(state.queue),
    }
    content = b"".join(encode_row(row) for row in [head, *map(group_to_row, state.queue)])
    path = _path(log_path, step)
    try:
        write_atomically(path, content)
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror or error}; free some space there, then "
            "continue the run from its last checkpoint"
        ) from error
    listed = {_path(log_path, record.batch or 0) for record in load_checkpoints_file(log_path)}
    for old in log_path.glob("async_queue_*.jsonl"):
        if old != path and old not in listed:
            old.unlink(missing_ok=True)


def read_queue(log_path: Path, step: int) -> QueueState | None:
    """Returns the state after ``step`` updates, or ``None`` if none was written.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = _path(log_path, step)
    if not path.exists():
        return None
    try:
        head, *rest = read_rows(path)
        if head["version"] != _VERSION or head["step"] != step or head["num_groups"] != len(rest):
            # A truncated file has fewer groups than its first line states.
            raise ValueError(f"its first line is {head} and {len(rest)} groups follow")
        batch, index = head["position"]
        begun = [(int(b), int(i)) for b, i in head["in_flight"]]
        return QueueState((batch, index), begun, [group_from_row(row) for row in rest])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path}: it is damaged or of another version ({type(error).__name__}: {error}), "
            "expected the queue of groups saved with the checkpoint after step "
            f"{step}; remove the file to go on without them, with the data of batch {step}"
        ) from error


def _path(log_path: Path, step: int) -> Path:
    return log_path / f"async_queue_{step:06d}.jsonl"


def group_to_row(rollouts: RolloutGroup) -> dict[str, Any]:
    """Returns a finished group as JSON, without the log of its environments."""
    group = rollouts.group
    return {
        "batch": rollouts.batch,
        "index": rollouts.index,
        "tags": list(rollouts.tags),
        "seconds": rollouts.seconds,
        "sampling_client_step": group.sampling_client_step,
        "final_rewards": list(group.final_rewards_G),
        "metrics": [_plain(metrics) for metrics in group.metrics_G],
        "rollout_errors": [str(error) for error in group.rollout_errors],
        "trajectories": [_plain(trajectory) for trajectory in group.trajectories_G],
    }


def group_from_row(row: Mapping[str, Any]) -> RolloutGroup:
    """Returns the group that :func:`group_to_row` wrote."""
    group = TrajectoryGroup(
        trajectories_G=[_trajectory(trajectory) for trajectory in row["trajectories"]],
        final_rewards_G=list(row["final_rewards"]),
        metrics_G=[_numbers(metrics) for metrics in row["metrics"]],
        rollout_errors=[RolloutError.parse(line) for line in row["rollout_errors"]],
        sampling_client_step=row["sampling_client_step"],
    )
    return RolloutGroup(
        row["batch"], row["index"], result=group, tags=list(row["tags"]), seconds=row["seconds"]
    )


def _plain(value: Any) -> Any:
    """Returns a trajectory, or a part of one, as JSON; NaN as ``{"nonfinite": "nan"}``."""
    if hasattr(value, "chunks"):  # a ModelInput
        # Text without images, the usual case, is one list of token ids.
        if all(hasattr(chunk, "tokens") for chunk in value.chunks):
            return [token for chunk in value.chunks for token in chunk.tokens]
        return value.model_dump(mode="json")
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):  # of turns, tokens or log-probabilities
        return [_plain(item) for item in value] if value and is_dataclass(value[0]) else value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {NONFINITE_KEY: str(value)}
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    turns = [
        Transition(
            **_fields(turn)
            | {
                "ob": _model_input(turn["ob"]),
                "ac": TokensWithLogprobs(**turn["ac"]),
                # Files of earlier versions lack it.
                "teacher_ob": _model_input(turn["teacher_ob"]) if turn.get("teacher_ob") else None,
            }
        )
        for turn in row["transitions"]
    ]
    reason = None if row["stop_reason"] is None else as_stop_reason(row["stop_reason"])
    ob = _model_input(row["final_ob"])
    return Trajectory(
        **_fields(row) | {"transitions": turns, "final_ob": ob, "stop_reason": reason}
    )


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "metrics": _numbers(row["metrics"]), "logs": _numbers(row["logs"])}


def _model_input(data: Any) -> tinker.ModelInput:
    if isinstance(data, list):
        return tinker.ModelInput.from_ints(data) if data else tinker.ModelInput.empty()
    return tinker.ModelInput.model_validate(data)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: float(value[NONFINITE_KEY]) if isinstance(value, dict) else value
        for key, value in values.items()
    }
