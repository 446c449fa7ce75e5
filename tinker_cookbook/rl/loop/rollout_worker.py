"""Playing one group of the dataset with one version of the weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tinker_cookbook.completers import StopCondition, TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    BackendError,
    TinkerCookbookError,
    TrainingError,
)
from tinker_cookbook.rl.config import PolicyTrainingConfig
from tinker_cookbook.rl.report.transcripts import group_log
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.rollouts.group import run_group
from tinker_cookbook.rl.rollouts.strategy import RolloutStrategy
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.utils.logtree import Trace

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutRequest:
    """A group to play, and its place in the data, which its random numbers come from.

    ``batch`` counts on over epochs; ``index`` is the place in the batch.
    """

    batch: int
    index: int
    builder: EnvGroupBuilder
    epoch: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """``(batch, index)``."""
        return self.batch, self.index


@dataclass(frozen=True)
class PolicySnapshot:
    """The weights after ``step`` updates."""

    client: SamplingClient
    step: int


@dataclass
class RolloutGroup:
    """A finished group, with what the loop knows of it."""

    batch: int
    index: int
    group: TrajectoryGroup
    tags: list[str] = field(default_factory=list)
    seconds: float = 0.0
    log: Trace | None = None
    substep: int = 0
    advantages: np.ndarray | None = None
    """[G]; filled in when the group is trained."""

    @property
    def sampling_step(self) -> int:
        """Updates in the weights that sampled it."""
        return self.group.sampling_client_step


@dataclass
class SnapshotPolicy(TinkerTokenCompleter):
    """Samples from a snapshot; an error that is not about the request names the snapshot.

    With ``separate`` every sample is a request of its own, which clients of user code may count on;
    otherwise a group's first answers are one request, whose prompt is run once.
    """

    step: int = 0
    separate: bool = False

    async def sample_many(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        num_samples: int,
        *,
        max_tokens: int | None = None,
    ) -> list[TokensWithLogprobs]:
        """See :meth:`TinkerTokenCompleter.sample_many`.

        Raises:
            BackendError: The weights cannot be sampled from any more.
        """
        try:
            if self.separate and num_samples > 1:
                requests = (
                    self.derived(place).sample_many(model_input, stop, 1, max_tokens=max_tokens)
                    for place in range(num_samples)
                )
                return [samples[0] for samples in await gather_or_cancel(requests)]
            return await super().sample_many(model_input, stop, num_samples, max_tokens=max_tokens)
        except TinkerCookbookError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled us: the backend dropped the request.
            raise self._gone("the backend dropped the request") from None
        except Exception as error:
            raise self._gone(f"{type(error).__name__}: {error}") from error

    def _gone(self, why: str) -> BackendError:
        return BackendError(
            f"sampling from the weights after {self.step} updates failed ({why}); the model may "
            "have been unloaded, its weights expired or the connection lost. Continue the run from "
            "its last checkpoint"
        )


class RolloutWorker:
    """Plays groups.

    Args:
        config: How to sample and play.
        on_done: Called with (groups done, groups in all) of the iteration after each.
        strategy: Handles failed rollouts; ``None``: as the config has it.
        separate: See :class:`SnapshotPolicy`.
    """

    def __init__(
        self,
        config: PolicyTrainingConfig,
        on_done: Callable[[int, int], None] | None = None,
        strategy: RolloutStrategy | None = None,
        separate: bool = False,
    ) -> None:
        self._config = config
        self._strategy = config.effective_rollout_strategy() if strategy is None else strategy
        self._rollouts = config.rollouts()
        self._on_done, self._separate = on_done, separate
        self.groups: list[RolloutGroup] = []
        """Finished since ``begin``, in the order in which they were."""
        self.begin(0)

    def begin(self, num_groups: int, done: int = 0) -> None:
        """An iteration begins, of this many groups, some of which may be done."""
        self.groups = []
        self._done, self._total = done, num_groups
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since ``begin``."""
        return time.monotonic() - self._began

    def policy(self, problem: RolloutRequest, snapshot: PolicySnapshot) -> SnapshotPolicy:
        """What plays the group. Its random numbers depend on seed and place in the data alone."""
        config = self._config
        policy = SnapshotPolicy(
            snapshot.client,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            step=snapshot.step,
            separate=self._separate,
        ).derived(problem.batch, problem.index)
        assert isinstance(policy, SnapshotPolicy)
        return policy

    async def play(self, problem: RolloutRequest, snapshot: PolicySnapshot) -> RolloutGroup | None:
        """Plays a group; ``None`` where no episode succeeded and the strategy allows for that."""
        began = time.monotonic()
        try:
            with group_log(problem.index < self._config.num_groups_to_log) as log:
                group = await run_group(
                    problem.builder,
                    self.policy(problem, snapshot),
                    strategy=self._strategy,
                    config=self._rollouts,
                )
        except TrainingError as error:
            failed = isinstance(error, AllTrajectoriesFailedError)
            if not (failed or self._strategy.catches_group_errors):
                raise
            logger.warning("group %d of batch %d left out: %s", problem.index, problem.batch, error)
            return None
        group.sampling_client_step = snapshot.step
        return RolloutGroup(
            problem.batch,
            problem.index,
            group,
            list(problem.builder.logging_tags()),
            time.monotonic() - began,
            log,
        )

    def note(self, group: RolloutGroup | None) -> None:
        """Counts a finished group."""
        self._done += 1
        if group is not None:
            self.groups.append(group)
        if self._on_done is not None:
            self._on_done(self._done, self._total)

    async def run_groups(
        self,
        problems: Sequence[RolloutRequest],
        snapshot: PolicySnapshot,
        then: Callable[[int, RolloutGroup | None], Awaitable[None]],
    ) -> None:
        """Plays groups at once; calls ``then(index, group)`` in the order in which they finish."""

        async def note(index: int, group: RolloutGroup | None) -> None:
            self.note(group)
            await then(index, group)

        jobs = {problem.index: self.play(problem, snapshot) for problem in problems}
        await for_each_finished(jobs, note)


async def for_each_finished(
    jobs: Mapping[int, Coroutine[Any, Any, T]], then: Callable[[int, T], Awaitable[None]]
) -> None:
    """Runs jobs at once and calls ``then(key, result)`` as they finish.

    Where anything fails, the other jobs are cancelled, and awaited, so that they can clean up; the
    error is raised as it is, not in a group of errors.
    """
    tasks = {asyncio.ensure_future(job): key for key, job in jobs.items()}
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.__getitem__):
                await then(tasks[task], task.result())
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits until they have cleaned up."""
    waited = list(tasks)
    for task in waited:
        # A second cancellation would interrupt the cleanup that the first one began.
        if not (isinstance(task, asyncio.Task) and task.cancelling()):
            task.cancel()
    await asyncio.gather(*waited, return_exceptions=True)
