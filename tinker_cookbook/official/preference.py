"""Parts of ``preference.train_dpo`` for loops of user code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tinker_cookbook.backends import SamplingClient, ServiceClient, TrainingClient
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.official.checkpoint_manager import CheckpointManager
from tinker_cookbook.preference.dpo_loss import PairLoss, reward_metrics
from tinker_cookbook.preference.reference import create_reference_client
from tinker_cookbook.preference.train_dpo import Config, Pairs, print_example
from tinker_cookbook.run.loggers import Logger
from tinker_cookbook.run.weights import create_training_client
from tinker_cookbook.supervised.train import run_evals
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.training.session import Metrics
from tinker_cookbook.utils.imports import torch


def create_dpo_clients(
    config: Config,
    service_client: ServiceClient,
    resume_info: CheckpointRecord | None = None,
    user_metadata: dict[str, str] | None = None,
) -> tuple[TrainingClient, SamplingClient]:
    """Creates the policy to train and the frozen reference, for custom loops.

    The reference is the initial policy, also if ``resume_info`` continues a run.
    """

    async def create() -> tuple[TrainingClient, SamplingClient]:
        return (
            await create_training_client(service_client, config, resume_info, user_metadata),
            await create_reference_client(service_client, config, config.reference_model_name),
        )

    return asyncio.run(create())


def compute_dpo_loss(
    chosen_logprobs: Sequence[torch.Tensor],
    rejected_logprobs: Sequence[torch.Tensor],
    chosen_ref_logprobs: Sequence[torch.Tensor],
    rejected_ref_logprobs: Sequence[torch.Tensor],
    dpo_beta: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Computes the mean DPO loss over P pairs, and the metrics of ``pair_metrics``.

    The sequences hold the log-probability of each whole answer, P scalars.
    """
    loss = PairLoss(beta=dpo_beta)
    loss.check()
    stack = torch.stack
    chosen = dpo_beta * (stack([*chosen_logprobs]) - stack([*chosen_ref_logprobs]))
    rejected = dpo_beta * (stack([*rejected_logprobs]) - stack([*rejected_ref_logprobs]))
    rewards = [side.detach().cpu().double().numpy() for side in (chosen, rejected)]
    metrics = reward_metrics(loss, rewards[0], rewards[1])
    return loss.of_rewards(chosen - rejected).mean(), metrics


def do_update(
    epoch_idx: int,
    batch_idx: int,
    n_batches: int,
    total_steps: int,
    config: Config,
    training_client: TrainingClient,
    reference_client: SamplingClient,
    evaluators: Sequence[Evaluator],
    infrequent_evaluators: Sequence[Evaluator],
    dataset: SupervisedDataset,
    ml_logger: Logger,
    log_path: str,
    tokenizer: Tokenizer,
    checkpoint_mgr: CheckpointManager | None = None,
) -> None:
    """Runs one update on one batch and logs its row of metrics, for custom loops.

    Due checkpoints and evaluations run before the update; in ``main`` they run after it. In
    the first step, prints the first pair. ``log_path`` has no effect.
    """
    step = epoch_idx * n_batches + batch_idx
    metrics: Metrics = {"epoch": epoch_idx, "progress": step / total_steps}
    if checkpoint_mgr is not None:
        place = {"epoch": epoch_idx, "batch": batch_idx}
        metrics |= checkpoint_mgr.maybe_save(step=step, loop_state=place) or {}
    for found, every in (
        (evaluators, config.eval_every),
        (infrequent_evaluators, config.infrequent_eval_every),
    ):
        if every > 0 and (step % every == 0 or step == total_steps - 1):
            metrics |= asyncio.run(run_evals(found, training_client, step))
    data = dataset.get_batch(batch_idx)
    if step == 0:
        for datum, label in zip(data[:2], ("Chosen", "Rejected"), strict=True):
            print_example(datum, tokenizer, label)
    pairs = Pairs(config.pair_loss, reference_client if config.pair_loss.needs_reference else None)
    batch = asyncio.run(pairs.prepare(step, data))
    adam = config.adam_params(step, total_steps)
    # Submit both before awaiting the first, so that the backend is never idle.
    output = pairs.submit(training_client, batch)
    update = training_client.optim_step(adam)
    metrics |= pairs.metrics(batch, output.result())
    update.result()
    metrics |= {"num_tokens": batch.num_tokens, "learning_rate": adam.learning_rate}
    ml_logger.log_metrics(metrics, step=step)
