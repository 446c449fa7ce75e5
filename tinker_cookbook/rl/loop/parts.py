"""Parts of a training loop, for loops of user code that are built from them.

The loop of this package (``rl.train.main``) overlaps sampling, training and saving and does not use
them; their names and arguments are those of the official cookbook's ``rl.train``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tinker_cookbook.display import format_trajectory
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.data_processing import (
    assemble_training_data,
    check_provenance,
    compute_advantages,
    data_for_loss,
)
from tinker_cookbook.rl.loop.adjuster import logprobs_of
from tinker_cookbook.rl.metrics import incorporate_kl_penalty
from tinker_cookbook.rl.report.trajectory_metrics import compute_trajectory_metrics
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.utils.console import get_console
from tinker_cookbook.utils.cost_estimation import CostTracker, TokenUsage
from tinker_cookbook.utils.lazy_imports import lazy_module
from tinker_cookbook.utils.misc_utils import split_list
from tinker_cookbook.utils.trace import scope, scope_span

if TYPE_CHECKING:
    import tinker
    import torch

    from tinker_cookbook.backends import SamplingClient, TrainingClient
    from tinker_cookbook.checkpoint_utils import CheckpointManager
    from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
    from tinker_cookbook.tokenizer_utils import Tokenizer
else:
    tinker = lazy_module("tinker")

T = TypeVar("T")

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def rollout_usage(trajectory_groups: Sequence[TrajectoryGroup]) -> TokenUsage:
    """The tokens that playing the groups took: those sampled, and the prompts of all turns."""
    turns = [
        turn
        for group in trajectory_groups
        for trajectory in group.trajectories_G
        for turn in trajectory.transitions
    ]
    cached = sum(turn.ac.prompt_cache_hit_tokens for turn in turns)
    return TokenUsage(
        sampled=sum(len(turn.ac.tokens) for turn in turns),
        prefill_cached=cached,
        prefill_uncached=sum(turn.ob.length for turn in turns) - cached,
    )


def training_usage(data_D: Sequence[tinker.Datum]) -> TokenUsage:
    """The tokens that one pass over the data trains on."""
    return TokenUsage(trained=sum(datum.model_input.length for datum in data_D))


def print_group(traj_group: TrajectoryGroup, tokenizer: Tokenizer) -> None:
    """Prints up to four trajectories of a group, from the lowest to the highest reward."""
    rewards = np.asarray(traj_group.get_total_rewards())
    order = np.argsort(rewards, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(4, len(order))).astype(int)]
    for member in chosen:
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
    """Training data of groups, their metrics, and the tokens that playing and scoring took.

    Args:
        env_group_builders_P: The builder of each group, for its tags.
        trajectory_groups_P: What was played; the first two groups are printed.
        tokenizer: Decodes what is printed.
        kl_reference_client: The policy to stay near; ``None``: there is no penalty.
        kl_penalty_coef: Weight of the penalty; 0: there is none.
        kl_discount_factor: As in ``incorporate_kl_penalty``.
        include_provenance: As in ``trajectory_to_data``.
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
        metrics.update(penalty)
        usage = usage + scored
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

    All passes are submitted before the first is awaited, so that the backend is never idle.

    Args:
        data_D: As ``assemble_training_data`` makes them, or datums for a loss of another kind.
        training_client: Of any backend.
        learning_rate: Of AdamW, whose other settings are beta1 0.9, beta2 0.95 and eps 1e-8.
        num_substeps: Optimizer steps; at most one for each datum.
        loss_fn: Name of the loss.
        loss_fn_config: Its settings.
        metrics: Gets those of the last optimizer step, as ``optim/NAME``.

    Returns:
        The learner's log-probabilities of the targets [T], for each datum.

    Raises:
        ConfigurationError: ``num_substeps`` is below 1.
        DataValidationError: The loss needs provenance that a datum lacks.
    """
    if num_substeps < 1:
        raise ConfigurationError(f"num_substeps: got {num_substeps}, expected at least 1")
    check_provenance(data_D, loss_fn)
    if not data_D:
        return []
    adam = tinker.AdamParams(learning_rate=learning_rate, **ADAM)
    passes, steps = [], []
    for part in split_list(data_D, min(num_substeps, len(data_D))):
        passes.append(
            training_client.forward_backward(
                data_for_loss(part, loss_fn),
                loss_fn,  # type: ignore[arg-type]
                loss_fn_config,
            )
        )
        steps.append(training_client.optim_step(adam))
    logprobs = [each for done in passes for each in logprobs_of(await done)]
    reports = [await step for step in steps]
    if metrics is not None:
        metrics.update({f"optim/{k}": v for k, v in (reports[-1].metrics or {}).items()})
    return [each.to_torch() for each in logprobs]


async def save_checkpoint_and_get_sampling_client(
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager | None,
    i_batch: int,
    start_batch: int = 0,
    record_stability_info: bool = False,
    cost_tracker: CostTracker | None = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """A sampling client of the present weights; before that a periodic checkpoint, if one is due.

    Args:
        training_client: Whose weights.
        checkpoint_mgr: Says whether a checkpoint is due, and saves it; ``None`` saves none.
        i_batch: Steps that are done.
        start_batch: Steps that were done when this process began, after which none is due.
        record_stability_info: Record what ``stable_reinforce`` trains on.
        cost_tracker: Its totals are saved with the checkpoint.

    Returns:
        The client, and metrics, of which there are none.
    """
    # Left out where it is the default: clients of other makers may not know it.
    options: dict[str, Any] = {"record_stability_info": True} if record_stability_info else {}
    if (
        checkpoint_mgr is not None
        and i_batch > start_batch
        and checkpoint_mgr.should_save_periodic(i_batch)
    ):
        async with scope_span("save_checkpoint"):
            state = loop_state(i_batch, cost_tracker)
            paths = await checkpoint_mgr.save_periodic_async(i_batch, state)
        # The checkpoint holds the weights for sampling, so they are not saved once more.
        create: Any = training_client.create_sampling_client  # type: ignore[attr-defined]
        client = create(paths["sampler_path"], **options)
        return (await client if inspect.isawaitable(client) else client), {}
    async with scope_span("save_weights_and_get_sampling_client"):
        return await training_client.save_weights_and_get_sampling_client(**options), {}


def loop_state(batch: int, cost_tracker: CostTracker | None) -> dict[str, Any]:
    """What a checkpoint keeps of the loop: the next batch, and the tracker's totals."""
    state: dict[str, Any] = {"batch": batch}
    if cost_tracker is not None:
        state["cumulative_tokens"] = asdict(cost_tracker.cumulative)
        state["discarded_tokens"] = asdict(cost_tracker.discarded)
    return state


@scope
async def run_single_evaluation(
    evaluator: SamplingClientEvaluator,
    config: Any,
    i_batch: int,
    sampling_client: SamplingClient,
    evaluator_label: str,
    store: Any = None,
) -> dict[str, Any]:
    """The metrics of one evaluator.

    ``config``, ``i_batch``, ``evaluator_label`` and ``store`` have no effect: evaluators of this
    package write their transcripts themselves.
    """
    return dict(await evaluator(sampling_client))


async def run_evaluations_parallel(
    evaluators: Sequence[SamplingClientEvaluator],
    sampling_client: SamplingClient,
    config: Any,
    i_batch: int,
    store: Any = None,
) -> dict[str, Any]:
    """The metrics of all evaluators, which run at the same time; of equal names the last counts."""
    work = (
        run_single_evaluation(evaluator, config, i_batch, sampling_client, str(number), store)
        for number, evaluator in enumerate(evaluators)
    )
    metrics: dict[str, Any] = {}
    for found in await asyncio.gather(*work):
        metrics.update(found)
    return metrics


async def gather_with_progress(coroutines: Iterable[Coroutine[Any, Any, T]], desc: str) -> list[T]:
    """The results of all coroutines in their order, with a progress bar named ``desc``."""
    from tqdm import tqdm  # comes with datasets; not needed by the loops of this package

    work = list(coroutines)
    with tqdm(total=len(work), desc=desc) as bar:

        async def track(coroutine: Coroutine[Any, Any, T]) -> T:
            result = await coroutine
            bar.update(1)
            return result

        return list(await asyncio.gather(*map(track, work)))
