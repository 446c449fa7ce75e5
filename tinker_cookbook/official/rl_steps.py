"""Training steps of ``rl.train`` for loops of user code; the loop of this package needs none."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import chz
import numpy as np

from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.display import format_trajectory
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.official.checkpoint_manager import CheckpointManager
from tinker_cookbook.official.cost_tracker import CostTracker
from tinker_cookbook.official.misc_utils import split_list
from tinker_cookbook.official.rl_metrics import compute_post_kl, incorporate_kl_penalty
from tinker_cookbook.rl.data_processing import (
    assemble_training_data,
    check_provenance,
    compute_advantages,
    data_for_loss,
)
from tinker_cookbook.rl.loop.adjuster import logprobs_of, submit_loss
from tinker_cookbook.rl.metrics import compute_kl_sample_train
from tinker_cookbook.rl.trajectory_metrics import compute_trajectory_metrics
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.cost_estimation import TokenUsage
from tinker_cookbook.utils.imports import tinker, torch
from tinker_cookbook.utils.terminal import get_console
from tinker_cookbook.utils.trace import scope, scope_span

if TYPE_CHECKING:
    from tinker_cookbook.rl.config import Config

T = TypeVar("T")

_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def _remove_mask(datum: tinker.Datum) -> tinker.Datum:
    """Returns the datum without the fields that no loss reads."""
    return data_for_loss([datum], "importance_sampling")[0]


def rollout_usage(trajectory_groups: Sequence[TrajectoryGroup]) -> TokenUsage:
    """Returns the tokens of the rollouts: sampled tokens, and the prompts of all turns."""
    turns = [
        turn
        for group in trajectory_groups
        for trajectory in group.trajectories_G
        for turn in trajectory.transitions
    ]
    # Each turn's prompt is the whole conversation; a cached prefix costs less.
    cached = sum(turn.ac.prompt_cache_hit_tokens for turn in turns)
    return TokenUsage(
        sampled=sum(len(turn.ac.tokens) for turn in turns),
        prefill_cached=cached,
        prefill_uncached=sum(turn.ob.length for turn in turns) - cached,
    )


def training_usage(data_D: Sequence[tinker.Datum]) -> TokenUsage:
    """Returns the tokens that one pass over the data trains on."""
    return TokenUsage(trained=sum(datum.model_input.length for datum in data_D))


def print_group(traj_group: TrajectoryGroup, tokenizer: Tokenizer) -> None:
    """Prints up to four trajectories of a group, from the lowest to the highest reward."""
    rewards = np.asarray(traj_group.get_total_rewards())
    order = np.argsort(rewards, kind="stable")
    # Evenly spaced ranks, the lowest and the highest included.
    for member in order[np.linspace(0, len(order) - 1, min(4, len(order))).astype(int)]:
        text = format_trajectory(traj_group.trajectories_G[member], tokenizer)
        title = f"trajectory {member}, reward {rewards[member]:.3g}"
        get_console().print(f"{title}\n{text}", markup=False, highlight=False, soft_wrap=True)


@scope
async def prepare_minibatch(
    env_group_builders_P: Sequence[EnvGroupBuilder],
    trajectory_groups_P: Sequence[TrajectoryGroup],
    tokenizer: Tokenizer,
    kl_reference_client: SamplingClient | None,
    kl_penalty_coef: float,
    kl_discount_factor: float,
    include_provenance: bool = True,
) -> tuple[list[tinker.Datum], dict[str, Any], TokenUsage]:
    """Returns the data of groups, their metrics, and the tokens of rollouts and scoring.

    The first two groups are printed. Without a reference or a coefficient there is no KL penalty.
    """
    tags_P = [builder.logging_tags() for builder in env_group_builders_P]
    metrics: dict[str, Any] = dict(compute_trajectory_metrics(trajectory_groups_P, tags_P))
    usage = rollout_usage(trajectory_groups_P)
    for group in trajectory_groups_P[:2]:
        print_group(group, tokenizer)
    data_D, _ = assemble_training_data(
        trajectory_groups_P, compute_advantages(trajectory_groups_P), include_provenance
    )
    if kl_penalty_coef > 0 and kl_reference_client is not None:
        penalty, scored = await incorporate_kl_penalty(
            data_D, kl_reference_client, kl_penalty_coef, kl_discount_factor
        )
        metrics, usage = metrics | penalty, usage + scored
    return data_D, metrics, usage


@scope
async def train_step(
    data_D: list[tinker.Datum],
    training_client: TrainingClient,
    learning_rate: float,
    num_substeps: int,
    loss_fn: str,
    loss_fn_config: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Trains on data in ``num_substeps`` optimizer steps of about the same number of datums.

    ``metrics`` receives those of the last optimizer step as ``optim/NAME``. Returns the learner's
    log-probabilities [T] of each datum's targets.

    Raises:
        ConfigurationError: ``num_substeps`` is below 1.
        DataValidationError: The loss needs provenance that a datum lacks.
    """
    if num_substeps < 1:
        raise ConfigurationError(f"num_substeps: got {num_substeps}, expected at least 1")
    # Of all data before the first step, so that an error leaves the weights unchanged.
    check_provenance(data_D, loss_fn)
    if not data_D:
        return []
    # Submit all operations before the first is awaited, so that the backend is never idle.
    adam = tinker.AdamParams(learning_rate=learning_rate, **_ADAM)
    passes, steps = [], []
    # With fewer datums than substeps no substep may be empty.
    for part in split_list(data_D, min(num_substeps, len(data_D))):
        passes.append(submit_loss(training_client, part, loss_fn, loss_fn_config))
        steps.append(training_client.optim_step(adam))
    logprobs = [each.to_torch() for done in passes for each in logprobs_of(await done)]
    reports = [await step for step in steps]
    if metrics is not None:
        metrics.update(_optim_metrics(reports[-1]))
    return logprobs


def _optim_metrics(step: Any) -> dict[str, Any]:
    return {f"optim/{name}": value for name, value in (step.metrics or {}).items()}


async def save_checkpoint_and_get_sampling_client(
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager | None,
    i_batch: int,
    start_batch: int = 0,
    record_stability_info: bool = False,
    cost_tracker: CostTracker | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """Saves a periodic checkpoint, if one is due, and returns a client of the current weights.

    ``i_batch`` is the number of finished steps, ``start_batch`` that at the start of this process.
    ``record_stability_info`` records what ``stable_reinforce`` trains on. The metrics are empty.
    """
    # Omitted if it is the default: clients of other backends may not know it.
    options: dict[str, Any] = {"record_stability_info": True} if record_stability_info else {}
    if (
        checkpoint_mgr is not None
        # Nothing was trained since the process started, so there is nothing new to save.
        and i_batch > start_batch
        and checkpoint_mgr.should_save_periodic(i_batch)
    ):
        async with scope_span("save_checkpoint"):
            state = loop_state(i_batch, cost_tracker)
            paths = await checkpoint_mgr.save_periodic_async(i_batch, state)
        # The checkpoint holds the weights for sampling, so they are not saved again.
        create: Any = training_client.create_sampling_client  # type: ignore[attr-defined]
        client = create(paths["sampler_path"], **options)
        return (await client if inspect.isawaitable(client) else client), {}
    async with scope_span("save_weights_and_get_sampling_client"):
        return await training_client.save_weights_and_get_sampling_client(**options), {}


def loop_state(batch: int, cost_tracker: CostTracker | None) -> dict[str, Any]:
    """Returns the loop state of a checkpoint: the next batch, and the tracker's totals."""
    if cost_tracker is None:
        return {"batch": batch}
    return {
        "batch": batch,
        "cumulative_tokens": asdict(cost_tracker.cumulative),
        "discarded_tokens": asdict(cost_tracker.discarded),
    }


@scope
async def run_single_evaluation(
    evaluator: SamplingClientEvaluator,
    config: Any,
    i_batch: int,
    sampling_client: SamplingClient,
    evaluator_label: str,
    store: Any = None,
) -> dict[str, Any]:
    """Returns the metrics of one evaluator; the other arguments have no effect."""
    return dict(await evaluator(sampling_client))


async def run_evaluations_parallel(
    evaluators: Sequence[SamplingClientEvaluator],
    sampling_client: SamplingClient,
    config: Any,
    i_batch: int,
    store: Any = None,
) -> dict[str, Any]:
    """Runs all evaluators concurrently and returns their metrics, merged in their order."""
    work = (
        run_single_evaluation(evaluator, config, i_batch, sampling_client, str(number), store)
        for number, evaluator in enumerate(evaluators)
    )
    return {name: v for found in await asyncio.gather(*work) for name, v in found.items()}


async def gather_with_progress(coroutines: Iterable[Coroutine[Any, Any, T]], desc: str) -> list[T]:
    """Returns the results of all coroutines in order, with a progress bar named ``desc``."""
    from tqdm.asyncio import tqdm  # not needed by the loops of this package

    return await tqdm.gather(*coroutines, desc=desc)


@chz.chz
class WrappedTrajectoryGroup:
    """Finished group with its builder and the number of updates in the sampling weights."""

    trajectory_group: TrajectoryGroup
    env_group_builder: EnvGroupBuilder
    sampling_client_step: int
    metrics: dict[str, Any] = chz.field(default_factory=dict)


@dataclass
class SamplingClientReuse:
    """Sampling client that is reused if no rollout needs newer weights."""

    sampling_client: SamplingClient
    rollout_workers_finished: asyncio.Event
    """Set once no more rollouts will start."""
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
    """Returns a sampling client of the new weights, and the metrics of the trained batch.

    ``i_batch`` is the number of finished steps, ``training_logprobs_D`` has the learner's
    log-probabilities [T] of each datum, in nats, and ``usage`` the tokens of the step before
    training. The client of ``sampling_client_reuse`` is returned if neither rollouts nor a
    checkpoint nor the KL of ``do_compute_post_kl`` need the new weights.
    """
    metrics: dict[str, Any] = dict(compute_kl_sample_train(data_D, training_logprobs_D))
    if cost_tracker is not None:
        # Before the checkpoint is saved, because its loop state includes the totals.
        metrics.update(cost_tracker.record_step(usage + training_usage(data_D)))
    reuse = sampling_client_reuse
    # Saving the weights takes time; skip it if nothing will be sampled from them.
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
            # The step is already counted; this adds the tokens that the new weights scored.
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
    """Trains on the groups of batch ``i_batch``; returns a client of the new weights, and metrics.

    See :func:`prepare_minibatch` and :func:`compute_full_batch_metrics_and_get_sampling_client`.
    """
    penalty = kl_reference_client, config.kl_penalty_coef, config.kl_discount_factor
    data_D, metrics, usage = await prepare_minibatch(
        env_group_builders_P, trajectory_groups_P, tokenizer, *penalty
    )
    counts = usage, cost_tracker, sampling_client_reuse
    client, trained = await train_on_data(
        config, i_batch, training_client, checkpoint_mgr, data_D, *counts
    )
    return client, metrics | trained


async def train_on_data(
    config: Config,
    i_batch: int,
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    data_D: list[tinker.Datum],
    *counts: Any,
) -> tuple[SamplingClient, dict[str, Any]]:
    """Trains on the data of batch ``i_batch``; returns a client of the new weights, and metrics.

    ``counts`` are ``usage``, ``cost_tracker`` and ``sampling_client_reuse``, all optional.
    """
    metrics: dict[str, Any] = {}
    loss = config.training_loss_fn(), config.loss_fn_config
    logprobs_D = await train_step(
        data_D, training_client, config.rate, config.num_substeps, *loss, metrics
    )
    settings = config.compute_post_kl, config.records_stability_info()
    client, after = await compute_full_batch_metrics_and_get_sampling_client(
        training_client, checkpoint_mgr, i_batch + 1, data_D, logprobs_D, *settings, *counts
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

    Groups that failed (``None``) or that the filter rejects count towards the size of a minibatch.
    Returns the client, the metrics and the groups; ``None`` if no group could be trained.
    """
    stream = config.stream_minibatch_config
    assert stream is not None
    size = stream.groups_per_batch // (config.num_substeps * stream.num_minibatches)
    adam = tinker.AdamParams(learning_rate=config.rate, **_ADAM)
    loss_fn = config.training_loss_fn()
    penalty = kl_reference_client, config.kl_penalty_coef, config.kl_discount_factor
    metrics, usage = {}, TokenUsage()
    data_D, groups, passes, optim_steps = [], [], [], []
    for _ in range(config.num_substeps):
        submitted = len(passes)
        for _ in range(stream.num_minibatches):
            # Each minibatch waits only for its groups, so training overlaps with sampling.
            arrived = [await trajectory_groups_queue.get() for _ in range(size)]
            kept = [one for one in arrived if one is not None and trajectory_group_filter(one)]
            if not kept:
                continue
            builders = [one.env_group_builder for one in kept]
            results = [one.trajectory_group for one in kept]
            part_D, found, used = await prepare_minibatch(builders, results, tokenizer, *penalty)
            # Not awaited: gradients accumulate until the optimizer step of the substep.
            passes.append(submit_loss(training_client, part_D, loss_fn, config.loss_fn_config))
            metrics.update(found)
            data_D, groups, usage = data_D + part_D, groups + kept, usage + used
        # Without a pass there is no gradient, and only momentum would move the weights.
        if len(passes) > submitted:
            optim_steps.append(training_client.optim_step(adam))
    if not groups:
        return None
    # Wait only now, when all operations are in the backend's queue.
    logprobs_D = [each.to_torch() for done in passes for each in logprobs_of(await done)]
    for step in optim_steps:
        metrics.update(_optim_metrics(await step))
    settings = config.compute_post_kl, config.records_stability_info(), usage, cost_tracker
    client, after = await compute_full_batch_metrics_and_get_sampling_client(
        training_client, checkpoint_mgr, i_batch + 1, data_D, logprobs_D, *settings
    )
    # The metrics of a minibatch cover only its groups, so the metrics of the batch replace them.
    tags_G = [one.env_group_builder.logging_tags() for one in groups]
    metrics.update(compute_trajectory_metrics([one.trajectory_group for one in groups], tags_G))
    return client, metrics | after, groups
