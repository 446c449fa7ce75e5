"""Rollout sources: they run the groups of each iteration and pass finished groups to training.

- ``BatchSource``, synchronous: trains the whole batch, once it is complete
- ``BatchSource`` with a ``stream``: trains parts of the batch, once each is complete
- ``AsyncSource`` (``async_source.py``): trains groups sampled by weights up to K updates old
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.completers import StopCondition, TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    BackendError,
    DataValidationError,
    TinkerCookbookError,
)
from tinker_cookbook.model_info import resolve_max_length
from tinker_cookbook.rl.config import Config, StreamMinibatchConfig
from tinker_cookbook.rl.report.transcripts import group_log
from tinker_cookbook.rl.rollouts.async_utils import cancel_and_wait
from tinker_cookbook.rl.rollouts.errors import add_group, error_record
from tinker_cookbook.rl.rollouts.group import run_group
from tinker_cookbook.rl.rollouts.place import RolloutPlace, at_place
from tinker_cookbook.rl.rollouts.strategy import FailFast, RolloutStrategy, skips_group
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RolloutError, TrajectoryGroup
from tinker_cookbook.supervised.prefetch import Prefetcher
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.command_line.entrypoint import program_takes
from tinker_cookbook.utils.error_logs import only_to_file
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.logtree import Trace
from tinker_cookbook.utils.trace import scope_span_sync

logger = logging.getLogger(__name__)

Metrics: TypeAlias = dict[str, float | int | str]


@dataclass
class RolloutGroup:
    """Running group: from its dataset to the optimizer step that trains it."""

    batch: int
    """Number of the batch, counted over all epochs."""
    index: int
    """Index in the batch."""
    builder: EnvGroupBuilder | None = None
    """Builds the environments; ``None`` for a finished group read from a checkpoint."""
    epoch: int = 0
    result: TrajectoryGroup | None = None
    tags: list[str] = field(default_factory=list)
    seconds: float = 0.0
    log: Trace | None = None
    substep: int = 0
    """Optimizer step of the iteration that trains the group."""
    advantages: np.ndarray | None = None
    """[G], set when the group is trained."""

    @property
    def position(self) -> tuple[int, int]:
        """``(batch, index)``, from which the group's random numbers are derived."""
        return self.batch, self.index

    @property
    def group(self) -> TrajectoryGroup:
        """Result of a finished group."""
        assert self.result is not None
        return self.result

    @property
    def sampling_step(self) -> int:
        """Number of updates in the weights that sampled the group."""
        return self.group.sampling_client_step


def problem_batches(
    dataset: RLDataset, seed: int, start: int, stop: int | None = None
) -> Iterator[list[RolloutGroup]]:
    """Yields the batches from ``start`` to ``stop``, counted over epochs, each epoch shuffled."""
    epoch = -1
    for number in itertools.count(start) if stop is None else range(start, stop):
        # The order of an epoch depends only on the seed and its number.
        if number // len(dataset) != epoch:
            epoch = number // len(dataset)
            dataset.set_epoch(seed + epoch)
        builders = dataset.get_batch(number % len(dataset))
        if not builders:
            raise DataValidationError(
                f"batch {number % len(dataset)} of {type(dataset).__name__} is empty, expected at "
                "least one EnvGroupBuilder; check its __len__"
            )
        yield [RolloutGroup(number, i, builder, epoch) for i, builder in enumerate(builders)]


@dataclass(frozen=True)
class PolicySnapshot:
    """Sampling client of the weights after ``step`` updates."""

    client: SamplingClient
    step: int


@dataclass
class SnapshotPolicy(TinkerTokenCompleter):
    """Policy that samples from a snapshot; errors of the backend name the snapshot."""

    step: int = 0

    async def sample_many(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        num_samples: int,
        *,
        max_tokens: int | None = None,
    ) -> list[TokensWithLogprobs]:
        """Returns samples; raises ``BackendError`` if the weights can no longer be sampled from."""
        try:
            return await super().sample_many(model_input, stop, num_samples, max_tokens=max_tokens)
        except TinkerCookbookError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # A cancellation of this task itself is passed on.
            if task is not None and task.cancelling():
                raise
            # This task was not cancelled, so the backend has dropped the request.
            raise self._failed("the backend dropped the request") from None
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error

    def _failed(self, why: str) -> BackendError:
        return BackendError(
            f"sampling from the weights after {self.step} updates failed ({why}); the model may "
            "have been unloaded, its weights expired or the connection lost. Continue the run from "
            "its last checkpoint"
        )


class RolloutWorker:
    """Runs the rollouts of groups and counts the finished groups of an iteration.

    ``on_done`` is called after each group with (finished groups, all groups) of the iteration.
    ``strategy`` replaces the config's handling of failed rollouts.
    """

    policy_type = SnapshotPolicy

    def __init__(
        self,
        config: Config,
        on_done: Callable[[int, int], None] | None = None,
        strategy: RolloutStrategy | None = None,
    ) -> None:
        self._config, self._rollout_config = config, config.rollouts()
        self._strategy = config.effective_rollout_strategy() if strategy is None else strategy
        self._on_done = on_done
        # An episode ends where its next prompt would fill the context.
        self._context = resolve_max_length(config.model_name, None)
        self._errors: list[RolloutError] = []
        self.begin(0)

    def begin(self, num_groups: int, done: int = 0) -> None:
        """Starts an iteration of ``num_groups`` groups, of which ``done`` are finished."""
        self.groups: list[RolloutGroup] = []
        """Finished groups of the iteration, in the order in which they finished."""
        self._done, self._total, self._warned = done, num_groups, False
        self._began = time.monotonic()
        if self._rollout_config.limits.rollout_timeout_seconds is None:
            keys = ("rollout_config", "rollout_timeout_seconds")
            key = next((key for key in keys if program_takes(key)), None)
            if key == "rollout_config":
                key = "rollout_config.limits.rollout_timeout_seconds"
            activity().episode_hint = f"{key} ends such episodes" if key else ""
        # Shows that sampling has begun; an environment may take long to finish its first group.
        if num_groups and self._on_done is not None:
            self._on_done(done, num_groups)

    @property
    def seconds(self) -> float:
        """Time since ``begin``."""
        return time.monotonic() - self._began

    async def run_group(self, group: RolloutGroup, snapshot: PolicySnapshot) -> RolloutGroup | None:
        """Runs a group and returns it; ``None`` if it failed and the strategy skips it."""
        assert group.builder is not None
        config, began = self._config, time.monotonic()
        # Random numbers depend only on the seed and the position in the data, so that neither the
        # order of the rollouts nor a resumed run changes a sample.
        policy = self.policy_type(
            snapshot.client,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            context_window=self._context,
            step=snapshot.step,
        ).derived(*group.position)
        try:
            place = RolloutPlace(config.log_path, ("train", *group.position))
            logged = group.index < config.num_groups_to_log
            with scope_span_sync("rollout"), at_place(place), group_log(logged) as group.log:
                group.result = await run_group(
                    group.builder, policy, strategy=self._strategy, config=self._rollout_config
                )
                group.tags = list(group.builder.logging_tags())
        except Exception as error:
            # A tolerant strategy skips the group; other errors end the run.
            if not skips_group(self._strategy, error):
                place = f"batch {group.batch}, group {group.index}"
                add_group(error, place, isinstance(self._strategy, FailFast))
                raise
            self._errors.append(error_record(error))
            message = "group %d of batch %d is skipped: %s"
            # One warning for each iteration, which has a summary too; the file has all of them.
            logger.warning(
                message, group.index, group.batch, error, extra=only_to_file(self._warned)
            )
            self._warned = True
            return None
        # Staleness is counted from the weights that sampled the group, not from when it finished.
        group.group.sampling_client_step = snapshot.step
        group.seconds = time.monotonic() - began
        return group

    def take_errors(self) -> list[RolloutError]:
        """Returns the errors of the groups that were skipped since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def count(self, group: RolloutGroup | None) -> None:
        """Counts a finished or skipped group."""
        self._done += 1
        if group is not None:
            self.groups.append(group)
        if self._on_done is not None:
            self._on_done(self._done, self._total)


@dataclass
class RolloutBatch:
    """Groups that a source passed to training in one iteration, in the order of the batch."""

    groups: list[RolloutGroup]
    epoch: int
    num_failed: int
    """Groups that were skipped because too few of their rollouts succeeded."""
    sampling_seconds: float
    """Time until the last group was finished."""
    metrics: Metrics
    """Metrics of the source."""
    errors: list[RolloutError] = field(default_factory=list)
    """Errors of the rollouts of skipped groups."""


Consume: TypeAlias = Callable[[Sequence[RolloutGroup]], Awaitable[None]]
"""Submits the training of finished groups."""


class GroupSource(AbstractAsyncContextManager["GroupSource"], ABC):
    """Source of the groups of each iteration; an async context manager."""

    @abstractmethod
    async def collect(
        self, step: int, snapshot: PolicySnapshot, consume: Consume
    ) -> RolloutBatch | None:
        """Runs the groups that update number ``step`` (from 0) trains; ``None``: none are left.

        ``snapshot`` has the weights after ``step`` updates. ``consume`` is called with groups that
        can be trained, one part after the other. Raises ``AllTrajectoriesFailedError`` if every
        group failed.
        """

    def update_weights(self, snapshot: PolicySnapshot) -> None:
        """Receives new weights as soon as they exist."""

    @abstractmethod
    def finished(self) -> list[RolloutGroup]:
        """Returns the finished groups of this iteration, trained or not."""

    def save(self, log_path: Path, step: int) -> None:
        """Saves the state that a run continued after update ``step`` needs."""

    @abstractmethod
    async def close(self) -> None:
        """Stops running work."""

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class BatchSource(GroupSource):
    """Source of the dataset's batches, one per iteration, sampled with the newest weights.

    A batch is split into ``num_substeps`` optimizer steps of contiguous groups. With ``stream`` a
    part of a substep, which has the groups that finish first, trains as soon as it is complete; the
    sum of the gradients equals the whole batch's up to rounding.
    """

    def __init__(
        self,
        batches: Iterator[list[RolloutGroup]],
        worker: RolloutWorker,
        num_substeps: int = 1,
        stream: StreamMinibatchConfig | None = None,
    ) -> None:
        # Building a batch tokenizes, so it runs in another thread.
        self._prefetcher = Prefetcher(batches)
        self._worker, self._num_substeps = worker, num_substeps
        self._num_minibatches = 0 if stream is None else stream.num_minibatches

    async def collect(self, step: int, snapshot: PolicySnapshot, consume: Consume) -> RolloutBatch:
        """Runs the next batch; see :meth:`GroupSource.collect`."""
        with activity().phase("waiting for the data"):
            batch = await self._prefetcher.next()
        for group in batch:
            group.substep = group.index * self._num_substeps // len(batch)
        # The size is rounded up, so that a substep has at most ``num_minibatches`` parts.
        parts = _Parts(batch, -(-len(batch) // (self._num_substeps * (self._num_minibatches or 1))))
        self._worker.begin(len(batch))
        tasks: dict[asyncio.Task[RolloutGroup | None], RolloutGroup] = {}
        for group in batch:
            tasks[asyncio.create_task(self._worker.run_group(group, snapshot))] = group
        # Pass finished groups on while the others still run.
        pending, groups = set(tasks), []
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                # Groups that finish together are handled in the order of the batch.
                for task in sorted(done, key=lambda task: tasks[task].index):
                    group = task.result()
                    self._worker.count(group)
                    if group is not None:
                        groups.append(group)
                    if self._num_minibatches:
                        for part in parts.add(tasks[task].substep, group):
                            await consume(part)
        finally:
            # After an error the other groups clean up before the error is raised.
            await cancel_and_wait(tasks)
        errors = self._worker.take_errors()
        if not groups:
            raise all_failed(step, len(batch), errors)
        # Training sees the groups in the order of the batch, whichever finished first.
        groups.sort(key=lambda group: group.index)
        # Taken before the whole batch is submitted, so that training does not count as sampling.
        seconds = self._worker.seconds
        if not self._num_minibatches:
            await consume(groups)
        num_failed = len(batch) - len(groups)
        return RolloutBatch(groups, batch[0].epoch, num_failed, seconds, {}, errors)

    def finished(self) -> list[RolloutGroup]:
        """Returns the finished groups in the order of the batch."""
        return sorted(self._worker.groups, key=lambda group: group.index)

    async def close(self) -> None:
        """Stops building batches."""
        await asyncio.to_thread(self._prefetcher.close)


class _Parts:
    """Finished groups of a batch that wait until a part of ``size`` groups is complete."""

    def __init__(self, batch: Sequence[RolloutGroup], size: int) -> None:
        self._size = size
        # Number of running groups, and list of finished groups, of each substep.
        self._running = Counter(group.substep for group in batch)
        self._ready: dict[int, list[RolloutGroup]] = {substep: [] for substep in self._running}
        self._substep = 0

    def add(self, substep: int, group: RolloutGroup | None) -> Iterator[list[RolloutGroup]]:
        """Adds a finished group (``None``: it failed); yields the parts that are now complete."""
        self._running[substep] -= 1
        if group is not None:
            self._ready[substep].append(group)
        # Substeps train in order: a part of a later substep waits for the current one.
        while self._substep in self._ready:
            ready = self._ready[self._substep]
            # The last part of a substep may be smaller, if groups failed.
            while len(ready) >= self._size or (ready and not self._running[self._substep]):
                part = sorted(ready[: self._size], key=lambda group: group.index)
                del ready[: self._size]
                yield part
            if self._running[self._substep]:
                return
            self._substep += 1


def all_failed(
    step: int, num_groups: int, errors: Sequence[RolloutError]
) -> AllTrajectoriesFailedError:
    """Returns the error of an iteration that has no group to train."""
    last = f" The last error: {errors[-1]}." if errors else ""
    return AllTrajectoriesFailedError(
        f"step {step + 1}: all {num_groups} groups failed{counted(errors)}, so the environments or "
        f"what they depend on are broken; fix it, and continue the run.{last} logs.log has all "
        "errors"
    )


def counted(errors: Sequence[RolloutError]) -> str:
    """Returns ``" (8 RuntimeError, 1 TimeoutError)"``, or ``""`` without errors."""
    counts = Counter(error.error_type for error in errors).most_common()
    return f" ({', '.join(f'{n} {kind}' for kind, n in counts)})" if counts else ""
