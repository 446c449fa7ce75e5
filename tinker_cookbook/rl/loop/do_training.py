"""RL loops over a client, a dataset, a logger and a checkpoint manager that the caller made.

``rl.train.main`` opens all of these from a config. These functions have the names and arguments of
the official cookbook's and run the same iterations (``loop.py``). As there, the row of batch ``i``
is step ``i``, evaluations before a batch stand in its row, and the last weights are evaluated in a
row of their own. The dataset is read once, from ``start_batch`` up to ``end_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.kl import KLPenalty
from tinker_cookbook.rl.loop.async_source import AsyncSource
from tinker_cookbook.rl.loop.discarded_work import (
    DiscardedWorkLog,
    count_discarded_rollout,
    drop_constant_reward_group,
)
from tinker_cookbook.rl.loop.iteration import Loop
from tinker_cookbook.rl.loop.parts import (
    loop_state,
    rollout_usage,
    run_evaluations_parallel,
    save_checkpoint_and_get_sampling_client,
    training_usage,
)
from tinker_cookbook.rl.loop.rollout_worker import RolloutGroup, RolloutWorker
from tinker_cookbook.rl.loop.sources import BatchSource, Collected, GroupSource, problem_batches
from tinker_cookbook.rl.loop.update import Metrics, Update
from tinker_cookbook.rl.report.live_view import RLProgress
from tinker_cookbook.rl.report.train_report import Reporter
from tinker_cookbook.rl.rollouts.group import RolloutErrorCounter
from tinker_cookbook.utils.misc_utils import all_same
from tinker_cookbook.utils.paths import local_path

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient, TrainingClient
    from tinker_cookbook.checkpoint_utils import CheckpointManager
    from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
    from tinker_cookbook.rl.config import Config, PolicyTrainingConfig
    from tinker_cookbook.rl.loop.adjuster import AdvantageAdjuster
    from tinker_cookbook.rl.rollouts.strategy import RolloutStrategy
    from tinker_cookbook.rl.types import RLDataset
    from tinker_cookbook.tokenizer_utils import Tokenizer
    from tinker_cookbook.utils.cost_estimation import CostTracker
    from tinker_cookbook.utils.ml_log import Logger


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

    Args:
        start_batch: First batch, which is the number of updates that were done before.
        end_batch: The batch to stop before.
        num_batches: Batches of the whole run, for the learning rate's schedule.
        config: Settings of sampling, training and evaluation.
        training_client: Of any backend.
        kl_reference_client: The policy of the KL penalty; ``None`` leaves it out.
        evaluators: Run every ``config.eval_every`` batches and after the last one.
        dataset: Its batches are groups to sample.
        ml_logger: Gets a row for each batch.
        tokenizer: Decodes transcripts.
        error_counter: Counts failed rollouts.
        strategy: Handles failed rollouts; ``None``: as ``config`` says.
        checkpoint_mgr: Saves periodic and rolling checkpoints; ``None`` saves none.
        cost_tracker: Counts tokens and cost.
    """
    session = CallerSession(
        config,
        training_client,
        ml_logger,
        start_batch,
        end_batch,
        evaluators,
        checkpoint_mgr,
        cost_tracker,
        error_counter,
    )
    stream = config.stream_minibatch_config
    source = BatchSource(
        problem_batches(dataset, config.seed, start_batch, end_batch),
        RolloutWorker(config, session.progress.sampling, strategy, separate=True),
        config.num_substeps,
        num_minibatches=0 if stream is None else stream.num_minibatches,
    )
    await run_loop(session, source, _penalty(config, kl_reference_client), tokenizer, num_batches)


async def do_sync_training_with_stream_minibatch(
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
    """As :func:`do_sync_training`, but parts of a batch are trained as soon as they are sampled.

    Raises:
        ConfigurationError: ``config.stream_minibatch_config`` is missing.
    """
    if config.stream_minibatch_config is None:
        raise ConfigurationError(
            "stream_minibatch_config: got None, expected StreamMinibatchConfig(groups_per_batch=…, "
            "num_minibatches=…); or call do_sync_training"
        )
    await do_sync_training(
        start_batch,
        end_batch,
        num_batches,
        config,
        training_client,
        kl_reference_client,
        evaluators,
        dataset,
        ml_logger,
        tokenizer,
        error_counter,
        strategy,
        checkpoint_mgr,
        cost_tracker,
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
    """Trains while sampling goes on, with the arguments of :func:`do_sync_training`.

    At most ``end_batch - start_batch`` updates of ``groups_per_batch`` groups each are made. Groups
    with a constant reward do not count where ``config.remove_constant_reward_groups`` drops them;
    where the dataset is used up, the groups that are left make a last, smaller update. Rollouts
    that still run after the last update are cancelled.

    Raises:
        ConfigurationError: ``config.async_config`` is missing.
    """
    if config.async_config is None:
        raise ConfigurationError(
            "async_config: got None, expected AsyncConfig(max_steps_off_policy=…, "
            "groups_per_batch=…); or call do_sync_training"
        )
    session = CallerSession(
        config,
        training_client,
        ml_logger,
        start_batch,
        end_batch,
        evaluators,
        checkpoint_mgr,
        cost_tracker,
        error_counter,
    )
    source = AsyncSource(
        dataset,
        RolloutWorker(config, session.progress.sampling, strategy, separate=True),
        config,
        end_batch,
        local_path(config.log_path),
        start_batch,
        stop_batch=end_batch,
        drop=session.drops,
    )
    await run_loop(session, source, _penalty(config, kl_reference_client), tokenizer, num_batches)


def _penalty(config: Config, reference: SamplingClient | None) -> KLPenalty | None:
    if reference is None or config.kl_penalty_coef == 0:
        return None
    return KLPenalty(reference, config.kl_penalty_coef, config.kl_discount_factor)


async def run_loop(
    session: CallerSession,
    source: GroupSource,
    adjuster: AdvantageAdjuster | None,
    tokenizer: Tokenizer,
    num_batches: int,
) -> None:
    """Runs the iterations over the caller's session; arguments as in :func:`do_sync_training`."""
    session.total_steps = num_batches
    with Reporter(session.config, session, session.progress, tokenizer) as reporter:
        loop = Loop(session.config, session, source, reporter, adjuster, session.record)
        async with source:
            await loop.run(session.end_step)
        await session.finish()


class CallerSession:
    """The session of a loop whose client, logger and checkpoint manager are the caller's.

    Rows are those of the official cookbook's loops, see the module.
    """

    def __init__(
        self,
        config: PolicyTrainingConfig,
        client: TrainingClient,
        ml_logger: Logger,
        start_step: int,
        end_step: int,
        evaluators: Sequence[SamplingClientEvaluator],
        checkpoint_mgr: CheckpointManager | None,
        cost: CostTracker | None = None,
        errors: RolloutErrorCounter | None = None,
    ) -> None:
        self.config, self.client = config, client
        self.start_step, self.end_step = start_step, end_step
        self.total_steps = end_step
        self.evaluators = list(evaluators)
        self.progress = RLProgress(end_step, start_step)
        self._log, self._checkpoints = ml_logger, checkpoint_mgr
        self._step = start_step
        self._newest: SamplingClient | None = None
        self._evaluated: Metrics = {}
        self._cost, self._errors = cost, errors
        self._counted: Metrics = {}
        self._discarded = DiscardedWorkLog(cost, ml_logger)

    def restored(self, key: str, default: int) -> int:
        """Returns the default: counters of an earlier process are in the caller's tracker."""
        return default

    def drops(self, group: RolloutGroup) -> bool:
        """Whether a finished group of an asynchronous run is left out; its tokens are counted."""
        kept = drop_constant_reward_group(
            group.group, self.config, self._cost, self._discarded, self._step
        )
        return kept is None

    def record(self, collected: Collected, update: Update) -> None:
        """Counts an iteration, whose new weights are the next that ``sampling_client`` gives."""
        self._step += 1
        groups = [played.group for played in collected.groups]
        if self._errors is not None:
            for group in [*groups, *[None] * collected.num_failed]:
                self._errors.ingest(group)
            self._counted = dict(self._errors.get_metrics())
        if self._cost is None:
            return
        if self.config.remove_constant_reward_groups:
            constant = [group for group in groups if all_same(group.get_total_rewards())]
            for group in constant:
                count_discarded_rollout(self._cost, group)
            groups = [group for group in groups if not any(group is one for one in constant)]
        usage = rollout_usage(groups) + training_usage(update.data)
        self._counted |= self._cost.record_step(usage)

    async def sampling_client(self, *, record_stability_info: bool = False) -> SamplingClient:
        """Returns a client for the present weights, and saves the checkpoint that is due."""
        self._newest, _ = await save_checkpoint_and_get_sampling_client(
            self.client,
            self._checkpoints,
            self._step,
            self.start_step,
            record_stability_info,
            self._cost,
        )
        if self._step == self.start_step:
            self._evaluated = await self.evaluate(self._step)
        return self._newest

    async def evaluate(self, step: int, *, last: bool = False) -> Metrics:
        """Metrics of the newest weights, if an evaluation is due after update ``step``."""
        every = self.config.eval_every
        if every <= 0 or not self.evaluators or (step % every != 0 and not last):
            return {}
        if self._newest is None:
            return {}  # evaluated as soon as there is a sampling client
        return await run_evaluations_parallel(self.evaluators, self._newest, self.config, step)

    def write_row(self, row: Metrics, step: int) -> None:
        """Logs a row."""
        self._log.log_metrics(row, step=step)

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
        self.write_row({**self._evaluated, **metrics, **self._counted}, step - 1)
        self._discarded.step_logged()
        self._evaluated = {}
        if self._checkpoints is not None:
            await self._checkpoints.maybe_save_rolling_async(step, loop_state(step, self._cost))
        if step < self.end_step:
            self._evaluated = await self.evaluate(step)

    async def finish(self) -> None:
        """Evaluates the last weights in a row of their own, if that was not done."""
        if self._step > self.start_step and not self._evaluated:
            self._evaluated = await self.evaluate(self._step, last=True)
        if self._evaluated:
            self.write_row(self._evaluated, self._step)
