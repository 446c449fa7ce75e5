"""Loops of ``rl.train`` over a client, a dataset, a logger and a checkpoint manager of the caller.

The iterations are the same as in ``rl.train.main``. As in the official loops the row of batch ``i``
is step ``i``, evaluations before a batch are in its row, and the last weights are evaluated in a
separate row. The dataset is read once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.official.checkpoint_manager import CheckpointManager
from tinker_cookbook.official.cost_tracker import CostTracker
from tinker_cookbook.official.rl_rollouts import RolloutErrorCounter
from tinker_cookbook.official.rl_steps import (
    loop_state,
    rollout_usage,
    run_evaluations_parallel,
    save_checkpoint_and_get_sampling_client,
    training_usage,
)
from tinker_cookbook.record.write import RecordWriter
from tinker_cookbook.rl.advantages import is_constant
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.loop.adjuster import AdvantageAdjuster
from tinker_cookbook.rl.loop.async_source import AsyncSource
from tinker_cookbook.rl.loop.iteration import Loop, Update
from tinker_cookbook.rl.loop.sources import (
    BatchSource,
    GroupSource,
    Metrics,
    RolloutBatch,
    RolloutGroup,
    RolloutWorker,
    SnapshotPolicy,
    problem_batches,
)
from tinker_cookbook.rl.metrics import KLPenalty
from tinker_cookbook.rl.report.live_view import RLProgress
from tinker_cookbook.rl.report.train_report import Reporter
from tinker_cookbook.rl.rollouts.async_utils import gather_or_cancel
from tinker_cookbook.rl.rollouts.strategy import RolloutStrategy
from tinker_cookbook.rl.types import RLDataset, TrajectoryGroup
from tinker_cookbook.run.loggers import Logger
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.activity import activity
from tinker_cookbook.utils.heartbeat import reporting_activity
from tinker_cookbook.utils.imports import tinker


async def do_sync_training(
    start_batch: int,
    end_batch: int,
    num_batches: int,
    config: Config,
    training_client: TrainingClient,
    kl_reference_client: SamplingClient | None,
    evaluators: list[SamplingClientEvaluator],
    dataset: RLDataset,
    ml_logger: Logger,
    tokenizer: Tokenizer,
    error_counter: RolloutErrorCounter | None = None,
    strategy: RolloutStrategy | None = None,
    checkpoint_mgr: CheckpointManager | None = None,
    cost_tracker: CostTracker | None = None,
) -> None:
    """Trains on the dataset's batches, each sampled with the newest weights.

    ``start_batch`` equals the number of earlier updates, and ``num_batches`` is of the whole run.
    Without a ``kl_reference_client`` there is no KL penalty; without a ``strategy`` that of the
    config handles failed rollouts.
    """
    clients = training_client, ml_logger, start_batch, end_batch, evaluators, checkpoint_mgr
    session = CallerSession(config, *clients, cost_tracker, error_counter)
    batches = problem_batches(dataset, config.seed, start_batch, end_batch)
    worker = CallerWorker(config, session.progress.sampling, strategy)
    source = BatchSource(batches, worker, config.num_substeps, config.stream_minibatch_config)
    await run_loop(session, source, _penalty(config, kl_reference_client), tokenizer, num_batches)


@functools.wraps(do_sync_training)
async def do_sync_training_with_stream_minibatch(*args: Any, **kwargs: Any) -> None:
    """As :func:`do_sync_training`; trains on parts of a batch as soon as they are sampled."""
    _require(kwargs.get("config") or args[3], "stream_minibatch_config", "StreamMinibatchConfig")
    await do_sync_training(*args, **kwargs)


def _require(config: Config, setting: str, expected: str) -> None:
    if getattr(config, setting) is None:
        raise ConfigurationError(
            f"{setting}: got None, expected {expected}(…); or call do_sync_training"
        )


async def do_async_training(
    start_batch: int,
    end_batch: int,
    num_batches: int,
    config: Config,
    training_client: TrainingClient,
    kl_reference_client: SamplingClient | None,
    evaluators: list[SamplingClientEvaluator],
    dataset: RLDataset,
    ml_logger: Logger,
    tokenizer: Tokenizer,
    error_counter: RolloutErrorCounter | None = None,
    strategy: RolloutStrategy | None = None,
    checkpoint_mgr: CheckpointManager | None = None,
    cost_tracker: CostTracker | None = None,
) -> None:
    """Trains while sampling continues; the arguments are the same as for :func:`do_sync_training`.

    Makes at most ``end_batch - start_batch`` updates of ``groups_per_batch`` groups each, not
    counting groups that ``config.remove_constant_reward_groups`` drops. At the end of the dataset
    the remaining groups make a last, smaller update. Rollouts that still run after it are
    cancelled.
    """
    _require(config, "async_config", "AsyncConfig")
    clients = training_client, ml_logger, start_batch, end_batch, evaluators, checkpoint_mgr
    session = CallerSession(config, *clients, cost_tracker, error_counter)
    source = AsyncSource(
        dataset,
        CallerWorker(config, session.progress.sampling, strategy),
        config,
        end_batch,
        local_path(config.log_path),
        start_batch,
        stop_batch=end_batch,
        drop=session.drops,
        stale_groups="train",  # as in the official cookbook
    )
    await run_loop(session, source, _penalty(config, kl_reference_client), tokenizer, num_batches)


def _penalty(config: Config, reference: SamplingClient | None) -> KLPenalty | None:
    if reference is None or config.kl_penalty_coef == 0:
        return None
    return KLPenalty(reference, config.kl_penalty_coef, config.kl_discount_factor)


class _SeparatePolicy(SnapshotPolicy):
    """Makes each sample one request, which clients of user code may rely on."""

    async def sample_many(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        num_samples: int,
        *,
        max_tokens: int | None = None,
    ) -> list[TokensWithLogprobs]:
        """Returns samples; see ``SnapshotPolicy``."""
        if num_samples == 1:
            return await super().sample_many(model_input, stop, 1, max_tokens=max_tokens)
        requests = (
            # Requests with equal seeds would return equal samples.
            self.derived(i).sample_many(model_input, stop, 1, max_tokens=max_tokens)
            for i in range(num_samples)
        )
        return [samples[0] for samples in await gather_or_cancel(requests)]


class CallerWorker(RolloutWorker):
    """Worker with a client of the caller."""

    policy_type = _SeparatePolicy


async def run_loop(
    session: CallerSession,
    source: GroupSource,
    adjuster: AdvantageAdjuster | None,
    tokenizer: Tokenizer,
    num_batches: int,
) -> None:
    """Runs the iterations over the caller's session; arguments as in :func:`do_sync_training`."""
    session.total_steps = num_batches
    # It has what the loop and its reporter use of a session.
    own: Any = session
    with (
        reporting_activity(),
        session.step_record,
        Reporter(session.config, own, session.progress, tokenizer) as reporter,
    ):
        loop = Loop(session.config, own, source, reporter, adjuster, session.record)
        # The source cancels running groups before the last evaluation.
        async with source:
            await loop.run(session.end_step)
        await session.finish()


@dataclass
class CallerSession:
    """Session of a loop over a client, logger and checkpoint manager of the caller."""

    config: Config
    client: TrainingClient
    ml_logger: Logger
    start_step: int
    end_step: int
    evaluators: Sequence[SamplingClientEvaluator]
    checkpoint_mgr: CheckpointManager | None
    cost: CostTracker | None = None
    errors: RolloutErrorCounter | None = None

    def __post_init__(self) -> None:
        self.total_steps = self.end_step
        self.stopped = False  # the caller decides about an early stop
        self.progress = RLProgress(self.end_step, self.start_step)
        self._step = self.start_step
        # The caller's own files are its log.
        self.step_record = RecordWriter(self.config.log_path, "off", self.start_step)
        self._newest: SamplingClient | None = None
        # Metrics for the next row: of evaluations, and of the trackers of errors and cost.
        self._evaluated: Metrics = {}
        self._counted: Metrics = {}
        self._discarded = DiscardedWorkLog(self.cost, self.ml_logger)

    def restored(self, key: str, default: int) -> int:
        """Returns the default: counters of an earlier process are in the caller's tracker."""
        return default

    def drops(self, group: RolloutGroup) -> bool:
        """Returns whether a finished group is dropped before training, and counts its tokens."""
        kept = drop_constant_reward_group(
            group.group, self.config, self.cost, self._discarded, self._step
        )
        return kept is None

    def record(self, collected: RolloutBatch, update: Update) -> None:
        """Counts an iteration before ``sampling_client`` returns its new weights."""
        self._step += 1
        groups = [rollouts.group for rollouts in collected.groups]
        if self.errors is not None:
            # The counter expects ``None`` for each skipped group.
            for group in [*groups, *[None] * collected.num_failed]:
                self.errors.ingest(group)
            self.errors.counts.update(error.error_type for error in collected.errors)
            self._counted = dict(self.errors.get_metrics())
        if self.cost is not None:
            # Groups that training dropped count as discarded work, not as rollouts.
            kept = [
                group
                for group in groups
                if drop_constant_reward_group(group, self.config, self.cost) is not None
            ]
            self._counted |= self.cost.record_step(
                rollout_usage(kept) + training_usage(update.data)
            )

    async def sampling_client(self, *, record_stability_info: bool = False) -> SamplingClient:
        """Saves the checkpoint that is due, and returns a client of the current weights."""
        steps = self._step, self.start_step
        self._newest, _ = await save_checkpoint_and_get_sampling_client(
            self.client, self.checkpoint_mgr, *steps, record_stability_info, self.cost
        )
        # The first client also serves the evaluation before the first batch, whose metrics are in
        # the first row.
        if self._step == self.start_step:
            self._evaluated = await self.evaluate(self._step)
        return self._newest

    async def evaluate(self, step: int, *, last: bool = False) -> Metrics:
        """Returns the metrics of the newest weights, if an evaluation is due after ``step``."""
        every = self.config.eval_every
        due = every > 0 and (step % every == 0 or last)
        if not due or not self.evaluators or self._newest is None:
            return {}
        with activity().phase("evaluating"):
            return await run_evaluations_parallel(self.evaluators, self._newest, self.config, step)

    def write_row(self, row: Metrics, step: int) -> None:
        """Logs a row of metrics."""
        self.ml_logger.log_metrics(row, step=step)

    async def finish_step(
        self,
        step: int,
        metrics: Metrics,
        *,
        epoch: int,
        counters: dict[str, int],
        before_save: Callable[[], None] | None = None,
    ) -> None:
        """Writes the row of the batch, saves a rolling checkpoint, and evaluates for the next."""
        # In the official loops the row of batch i is step i.
        self.write_row({**self._evaluated, **metrics, **self._counted}, step - 1)
        self._discarded.step_logged()
        if self.checkpoint_mgr is not None:
            await self.checkpoint_mgr.maybe_save_rolling_async(step, loop_state(step, self.cost))
        # The evaluation after this batch is part of the next row, as in the official loops.
        self._evaluated = await self.evaluate(step) if step < self.end_step else {}

    async def finish(self) -> None:
        """Evaluates the last weights in a separate row, if they were not evaluated yet."""
        # An asynchronous run may end early, after an evaluation that no row has.
        if self._step > self.start_step and not self._evaluated:
            self._evaluated = await self.evaluate(self._step, last=True)
        if self._evaluated:
            self.write_row(self._evaluated, self._step)


DISCARDED_WORK_LOG_INTERVAL_SECONDS = 60.0
"""Seconds between two summaries of discarded work in a run whose steps log nothing."""


def count_discarded_rollout(
    cost_tracker: CostTracker | None, trajectory_group: TrajectoryGroup
) -> None:
    """Counts the tokens of a finished group that is dropped before training."""
    if cost_tracker is not None:
        cost_tracker.record_discarded_sampling(rollout_usage([trajectory_group]))


def drop_constant_reward_group(
    trajectory_group: TrajectoryGroup | None,
    config: Config,
    cost_tracker: CostTracker | None,
    discarded_log: DiscardedWorkLog | None = None,
    step: int = 0,
) -> TrajectoryGroup | None:
    """Returns the group, or ``None`` if ``remove_constant_reward_groups`` drops it.

    The tracker counts the tokens of a dropped group; the log writes the totals at intervals.
    """
    if trajectory_group is None or not config.remove_constant_reward_groups:
        return trajectory_group
    # An advantage compares the members of a group: equal rewards give nothing to learn.
    if not is_constant(trajectory_group.get_total_rewards()):
        return trajectory_group
    # Its advantages are all 0, so it has no gradient, but its tokens were sampled.
    count_discarded_rollout(cost_tracker, trajectory_group)
    if discarded_log is not None:
        discarded_log.discarded(step)
    return None


class DiscardedWorkLog:
    """Log of discarded work for times without a training step, because all groups are dropped.

    The totals, which a step would log, are logged as a summary at most every ``interval_seconds``
    (default: ``rl.train.DISCARDED_WORK_LOG_INTERVAL_SECONDS``).
    """

    def __init__(
        self,
        cost_tracker: CostTracker | None,
        ml_logger: Logger,
        *,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost_tracker, self.ml_logger, self.clock = cost_tracker, ml_logger, clock
        from tinker_cookbook.rl import train  # a user may have set the interval there

        default: float = train.DISCARDED_WORK_LOG_INTERVAL_SECONDS
        self.interval_seconds = default if interval_seconds is None else interval_seconds
        self._logged_at = clock()

    def step_logged(self) -> None:
        """Restarts the interval, because a step has just logged the totals."""
        self._logged_at = self.clock()

    def discarded(self, step: int) -> None:
        """Logs the totals if the interval is over; called after a group was counted."""
        now = self.clock()
        # At intervals, because a line for each dropped group would fill the log.
        if self.cost_tracker is not None and now - self._logged_at >= self.interval_seconds:
            self._logged_at = now
            self.ml_logger.log_summary(self.cost_tracker.cumulative_metrics())
