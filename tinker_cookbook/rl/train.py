"""The reinforcement learning loop.

    python -m tinker_cookbook.rl.train model_name=… log_path=… max_tokens=… \\
        dataset_builder=module:Class dataset_builder.KEY=…
    python -m tinker_cookbook.rl.train dataset_builder=mine:MyDatasetBuilder --help

An iteration runs a batch of groups with the newest weights, trains on them, and uses the new
weights (``loop/iteration.py``). A source runs the groups and decides when each is trained
(``loop/sources.py``: synchronous and streaming, ``loop/async_source.py``: asynchronous).

Rows of ``metrics.jsonl``: ``step`` counts finished iterations (with ``num_substeps`` each has
several optimizer steps). Row 0 holds the evaluations before training; row k the metrics of the k-th
batch, sampled and trained with the weights before its update, and the evaluations after it.
Transcripts of that batch are in ``iteration_{k-1}``, whose number is ``progress/batch``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.leaves import load_leaf
from tinker_cookbook.rl.config import (
    AsyncConfig,
    Config,
    KLReferenceConfig,
    StreamMinibatchConfig,
)
from tinker_cookbook.rl.loop.adjuster import AdvantageAdjuster
from tinker_cookbook.rl.loop.async_source import AsyncSource
from tinker_cookbook.rl.loop.iteration import Loop
from tinker_cookbook.rl.loop.sources import BatchSource, GroupSource, RolloutWorker, problem_batches
from tinker_cookbook.rl.losses import check_substeps
from tinker_cookbook.rl.metrics import KLPenalty
from tinker_cookbook.rl.report.live_view import RLProgress
from tinker_cookbook.rl.report.train_report import Reporter
from tinker_cookbook.rl.rollouts.group import set_rollout_executor
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.run.paths import local_path
from tinker_cookbook.training.config import prepared
from tinker_cookbook.training.restarts import through_restarts
from tinker_cookbook.training.session import (
    TrainingSession,
    is_complete,
    training_session,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.heartbeat import reporting_activity
from tinker_cookbook.utils.imports import official_names

__all__ = [
    "AsyncConfig",
    "Config",
    "KLReferenceConfig",
    "StreamMinibatchConfig",
    "main",
    "run",
]

__getattr__ = official_names(__name__)

logger = logging.getLogger(__name__)


async def main(config: Config, rollout_executor: Executor | None = None) -> None:
    """Trains, or continues the run in ``config.log_path``.

    ``rollout_executor`` runs the groups (see ``set_rollout_executor``); default: the event loop.

    Raises:
        ConfigurationError: A setting cannot work; nothing was loaded or sampled.
    """
    async with prepared(config) as config:
        await run(config, config.data_builder(), partial(_kl_penalty, config), rollout_executor)


async def _kl_penalty(config: Config, session: TrainingSession) -> AdvantageAdjuster | None:
    reference = config.kl_reference_config
    if config.kl_penalty_coef == 0 or reference is None:
        return None
    path = reference.load_checkpoint_path
    client = await session.connection.service.create_sampling_client(
        model_path=path, base_model=reference.base_model if path is None else None
    )
    return KLPenalty(client, config.kl_penalty_coef, config.kl_discount_factor)


@through_restarts
async def run(
    config: Config,
    dataset_builder: RLDatasetBuilder,
    make_adjuster: Callable[[TrainingSession], Awaitable[AdvantageAdjuster | None]],
    rollout_executor: Executor | None = None,
) -> None:
    """Runs the loop with any adjustment of the advantages, as :func:`main` does for a KL penalty.

    ``config`` has been checked. ``make_adjuster`` is called once, before anything is sampled; it
    returns ``None`` if the advantages depend only on the rewards.
    """
    # 1. Build the dataset and check that it fits the settings, before a model is loaded.
    with reporting_activity() as now, now.phase("building the dataset"):
        train_set, test_set = await dataset_builder()
        batch_size = await asyncio.to_thread(check_first_batch, config, train_set)
    total_steps = count_steps(config, len(train_set), batch_size)
    set_rollout_executor(rollout_executor)
    # 2. Open the run folder, connect, and create or restore the training client.
    async with training_session(config, train_set, total_steps) as session:
        # A finished run that is started again does not need a model.
        if is_complete(session, total_steps):
            return
        client = await session.start(total_steps)
        tokenizer = await asyncio.to_thread(client.get_tokenizer)
        # Before the rollouts, so that a reference or teacher that cannot be loaded fails early.
        adjuster = await make_adjuster(session)
        loss = config.training_loss_fn()
        if loss == "stable_reinforce" and session.connection.kind == "local":
            from tinker_cookbook.engine.training.losses import STAND_IN_NOTE  # loads torch

            session.print(STAND_IN_NOTE)
        stale = config.async_config is not None and config.async_config.max_steps_off_policy > 0
        if stale and loss in ("importance_sampling", "cispo"):
            logger.warning(
                "async_config.loss_fn=%s can become unstable on data of older weights; "
                "stable_reinforce or ppo are safer",
                loss,
            )
        # 3. Run the iterations.
        progress = RLProgress(total_steps, session.start_step)
        with Reporter(config, session, progress, tokenizer) as reporter:
            reporter.add_evaluators(test_set)
            worker = RolloutWorker(config, progress.sampling)
            source: GroupSource
            if config.episodes_from is not None:
                source = load_leaf("replay.source", "episodes_from").RecordedSource(config)
            elif config.async_config is not None:
                log_path = local_path(config.log_path)
                source = AsyncSource(
                    train_set, worker, config, total_steps, log_path, session.start_step
                )
            else:
                # A resumed run continues with the batch after its last update.
                batches = problem_batches(train_set, config.seed, session.start_step, total_steps)
                source = BatchSource(
                    batches, worker, config.num_substeps, config.stream_minibatch_config
                )
            loop = Loop(config, session, source, reporter, adjuster)
            async with source:
                await loop.run(total_steps)
        session.print(*session.summary())


def check_first_batch(config: Config, dataset: RLDataset) -> int:
    """Returns the number of groups in the dataset's first batch, before anything is sampled.

    Raises:
        DataValidationError: There are no batches, or the first is empty.
        ConfigurationError: The settings do not fit it.
    """
    if len(dataset) < 1:
        raise DataValidationError(
            f"dataset_builder: {type(dataset).__name__} has {len(dataset)} batches, expected at "
            "least one; is groups_per_batch larger than the number of problems?"
        )
    first = next(problem_batches(dataset, config.seed, 0, 1))
    if config.async_config is not None:
        return len(first)  # an asynchronous run forms batches of groups itself
    check_substeps(len(first), config.num_substeps)
    stream = config.stream_minibatch_config
    if stream is not None and stream.groups_per_batch != len(first):
        raise ConfigurationError(
            f"stream_minibatch_config.groups_per_batch: got {stream.groups_per_batch}, but the "
            f"dataset's first batch has {len(first)} groups; expected the same number"
        )
    return len(first)


def count_steps(config: Config, num_batches: int, batch_size: int) -> int:
    """Returns the iterations of the run: ``max_steps``, or the length of ``num_epochs``.

    ``max_steps`` beyond the epochs repeats the data, as in TRL.
    """
    if config.max_steps is not None:
        return config.max_steps
    if config.async_config is None:
        return num_batches * config.num_epochs
    # An asynchronous run counts updates of its own batch size over the same groups.
    size = (config.stream_minibatch_config or config.async_config).groups_per_batch
    return max(1, num_batches * config.num_epochs * batch_size // size)


if __name__ == "__main__":
    run_entrypoint(main)
