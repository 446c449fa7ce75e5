"""Single training steps, for loops of user code: from finished groups to new sampling weights.

The loop of this package (``loop.py``) overlaps more and does not use them; their names and
arguments are those of the official cookbook's ``rl.train``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.rl.loop.adjuster import logprobs_of, submit_policy_loss
from tinker_cookbook.rl.loop.parts import (
    ADAM,
    prepare_minibatch,
    save_checkpoint_and_get_sampling_client,
    train_step,
    training_usage,
)
from tinker_cookbook.rl.metrics import (
    compute_kl_sample_train,
    compute_post_kl,
)
from tinker_cookbook.rl.report.trajectory_metrics import compute_trajectory_metrics
from tinker_cookbook.utils.cost_estimation import TokenUsage
from tinker_cookbook.utils.lazy_imports import lazy_module
from tinker_cookbook.utils.trace import scope

if TYPE_CHECKING:
    import tinker
    import torch

    from tinker_cookbook.backends import SamplingClient, TrainingClient
    from tinker_cookbook.checkpoint_utils import CheckpointManager
    from tinker_cookbook.rl.config import Config, PolicyTrainingConfig
    from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
    from tinker_cookbook.tokenizer_utils import Tokenizer
    from tinker_cookbook.utils.cost_estimation import CostTracker
else:
    tinker = lazy_module("tinker")


@chz.chz
class WrappedTrajectoryGroup:
    """A finished group, its builder, and the updates in the weights that sampled it."""

    trajectory_group: TrajectoryGroup
    env_group_builder: EnvGroupBuilder
    sampling_client_step: int
    metrics: dict[str, Any] = chz.field(default_factory=dict)


@dataclass
class SamplingClientReuse:
    """A sampling client that goes on to be used where no rollout needs newer weights.

    Attributes:
        sampling_client: The client so far.
        rollout_workers_finished: Set once no more rollouts will be started.
        reused: Whether the client was used again.
    """

    sampling_client: SamplingClient
    rollout_workers_finished: asyncio.Event
    reused: bool = False


@scope
async def compute_full_batch_metrics_and_get_sampling_client(
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    i_batch: int,
    data_D: list[tinker.Datum],
    training_logprobs_D: list[torch.Tensor],
    do_compute_post_kl: bool,
    record_stability_info: bool = False,
    usage: TokenUsage = TokenUsage(),  # noqa: B008  (frozen)
    cost_tracker: CostTracker | None = None,
    sampling_client_reuse: SamplingClientReuse | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """Metrics of a trained batch, and a sampling client of the new weights.

    Args:
        training_client: It has trained on the batch.
        checkpoint_mgr: Saves the periodic checkpoint, if one is due.
        i_batch: Steps that are done.
        data_D: The batch's datums.
        training_logprobs_D: The learner's log-probabilities [T] of each datum, in nats.
        do_compute_post_kl: Measure how far the update moved the policy, on the same tokens.
        record_stability_info: Record what ``stable_reinforce`` trains on.
        usage: Tokens of the step before training.
        cost_tracker: Counts the step before its checkpoint is saved.
        sampling_client_reuse: Its client is returned where no rollout will be started any more and
            neither a checkpoint nor the KL needs the new weights.
    """
    metrics: dict[str, Any] = dict(compute_kl_sample_train(data_D, training_logprobs_D))
    if cost_tracker is not None:
        metrics.update(cost_tracker.record_step(usage + training_usage(data_D)))
    reuse = sampling_client_reuse
    if (
        reuse is not None
        and reuse.rollout_workers_finished.is_set()
        and not do_compute_post_kl
        and not checkpoint_mgr.should_save_periodic(i_batch)
    ):
        reuse.reused = True
        return reuse.sampling_client, metrics
    client, saved = await save_checkpoint_and_get_sampling_client(
        training_client,
        checkpoint_mgr,
        i_batch,
        record_stability_info=record_stability_info,
        cost_tracker=cost_tracker,
    )
    metrics.update(saved)
    if do_compute_post_kl:
        moved, scored = await compute_post_kl(data_D, client)
        metrics.update(moved)
        if cost_tracker is not None:
            metrics.update(cost_tracker.extend_step(scored))
    return client, metrics


@scope
async def do_train_step_and_get_sampling_client(
    config: Config,
    i_batch: int,
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    kl_reference_client: SamplingClient | None,
    tokenizer: Tokenizer,
    env_group_builders_P: Sequence[EnvGroupBuilder],
    trajectory_groups_P: list[TrajectoryGroup],
    cost_tracker: CostTracker | None = None,
    sampling_client_reuse: SamplingClientReuse | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """Trains on the groups of batch ``i_batch`` and returns a client of the new weights.

    Args:
        config: Settings of the loss, the KL penalty and the optimizer.
        i_batch: Number of the batch, so ``i_batch + 1`` steps are done afterwards.
        training_client: Of any backend.
        checkpoint_mgr: Saves the periodic checkpoint, if one is due.
        kl_reference_client: The policy of the KL penalty, if there is one.
        tokenizer: Decodes the trajectories that are printed.
        env_group_builders_P: The builder of each group, for its tags.
        trajectory_groups_P: The finished groups.
        cost_tracker: Counts tokens and cost.
        sampling_client_reuse: See :func:`compute_full_batch_metrics_and_get_sampling_client`.

    Returns:
        The client, and the step's metrics.
    """
    data_D, metrics, usage = await prepare_minibatch(
        env_group_builders_P,
        trajectory_groups_P,
        tokenizer,
        kl_reference_client,
        config.kl_penalty_coef,
        config.kl_discount_factor,
    )
    client, trained = await train_on_data(
        config,
        i_batch,
        training_client,
        checkpoint_mgr,
        data_D,
        usage,
        cost_tracker,
        sampling_client_reuse,
    )
    return client, metrics | trained


async def train_on_data(
    config: PolicyTrainingConfig,
    i_batch: int,
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    data_D: list[tinker.Datum],
    usage: TokenUsage = TokenUsage(),  # noqa: B008  (frozen)
    cost_tracker: CostTracker | None = None,
    sampling_client_reuse: SamplingClientReuse | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """Trains on the data of batch ``i_batch`` and returns a client of the new weights.

    Arguments and metrics are those of :func:`do_train_step_and_get_sampling_client`, without what
    the groups themselves say; ``usage`` counts the tokens before training.
    """
    metrics: dict[str, Any] = {}
    logprobs_D = await train_step(
        data_D,
        training_client,
        config.learning_rate,
        config.num_substeps,
        config.training_loss_fn(),
        config.loss_fn_config,
        metrics,
    )
    client, after = await compute_full_batch_metrics_and_get_sampling_client(
        training_client,
        checkpoint_mgr,
        i_batch + 1,
        data_D,
        logprobs_D,
        config.compute_post_kl,
        config.records_stability_info(),
        usage,
        cost_tracker,
        sampling_client_reuse,
    )
    return client, metrics | after


@scope
async def do_train_step_streaming_and_get_sampling_client(
    config: Config,
    i_batch: int,
    trajectory_groups_queue: asyncio.Queue[Any],
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    kl_reference_client: SamplingClient | None,
    tokenizer: Tokenizer,
    trajectory_group_filter: Callable[[WrappedTrajectoryGroup | None], bool] = lambda _: True,
    cost_tracker: CostTracker | None = None,
) -> tuple[SamplingClient | None, dict[str, Any], list[WrappedTrajectoryGroup]] | None:
    """Trains on groups from a queue: a pass for each minibatch, an optimizer step for each substep.

    ``config.stream_minibatch_config`` says how many groups a step and a minibatch have. A pass is
    submitted as soon as its groups are there. Every group counts towards them, also one that failed
    (``None``) or that the filter leaves out. The other arguments are those of
    :func:`do_train_step_and_get_sampling_client`.

    Returns:
        The client, the step's metrics and its groups; ``None`` where no group could be trained.
    """
    stream = config.stream_minibatch_config
    assert stream is not None
    size = stream.groups_per_batch // (config.num_substeps * stream.num_minibatches)
    adam = tinker.AdamParams(learning_rate=config.learning_rate, **ADAM)
    metrics: dict[str, Any] = {}
    data_D: list[tinker.Datum] = []
    groups: list[WrappedTrajectoryGroup] = []
    usage = TokenUsage()
    passes: list[Any] = []
    optim_steps: list[Any] = []
    for _ in range(config.num_substeps):
        submitted = len(passes)
        for _ in range(stream.num_minibatches):
            arrived = [await trajectory_groups_queue.get() for _ in range(size)]
            kept = [one for one in arrived if one is not None and trajectory_group_filter(one)]
            if not kept:
                continue
            part_D, found, used = await prepare_minibatch(
                [one.env_group_builder for one in kept],
                [one.trajectory_group for one in kept],
                tokenizer,
                kl_reference_client,
                config.kl_penalty_coef,
                config.kl_discount_factor,
            )
            passes.append(submit_policy_loss(training_client, part_D, config))
            metrics.update(found)
            data_D, groups, usage = data_D + part_D, groups + kept, usage + used
        if len(passes) > submitted:
            optim_steps.append(training_client.optim_step(adam))
    if not groups:
        return None
    logprobs_D = [each.to_torch() for done in passes for each in logprobs_of(await done)]
    for step in optim_steps:
        metrics.update({f"optim/{name}": v for name, v in ((await step).metrics or {}).items()})
    client, after = await compute_full_batch_metrics_and_get_sampling_client(
        training_client,
        checkpoint_mgr,
        i_batch + 1,
        data_D,
        logprobs_D,
        config.compute_post_kl,
        config.records_stability_info(),
        usage,
        cost_tracker,
    )
    # Those of the parts stand for their own groups alone.
    tags_G = [one.env_group_builder.logging_tags() for one in groups]
    metrics.update(compute_trajectory_metrics([one.trajectory_group for one in groups], tags_G))
    return client, metrics | after, groups
