"""Parts of ``distillation.train_on_policy`` for loops of user code.

Teachers have the student's prompt; ``service_client`` and ``store`` have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.distillation.datasets import CompositeDataset
from tinker_cookbook.distillation.on_policy_teachers import Teacher, TeacherSignal, add_reverse_kl
from tinker_cookbook.distillation.train_on_policy import Config, TeacherDataset
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.official.checkpoint_manager import CheckpointManager
from tinker_cookbook.official.rl_loops import CallerSession, CallerWorker, run_loop
from tinker_cookbook.official.rl_steps import print_group, train_on_data
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.loop.sources import BatchSource, problem_batches
from tinker_cookbook.rl.metrics import trained_values
from tinker_cookbook.rl.trajectory_metrics import compute_trajectory_metrics
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from tinker_cookbook.run.loggers import Logger
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.model_inputs import score_datums


async def incorporate_kl_penalty(
    data_D: list[tinker.Datum],
    teacher_clients_D: Sequence[SamplingClient],
    dataset_indices_D: Sequence[int],
    kl_penalty_coef: float,
    kl_discount_factor: float,
) -> dict[str, float]:
    """Adds ``-coef * mask * (student logprob - teacher logprob)`` to the advantages.

    Changes ``data_D``; each datum has a teacher and the index of a dataset. Returns ``teacher_kl``
    and ``teacher_kl/dataset_i`` (see ``on_policy_teachers``); empty if no token is trained.
    """
    scores: dict[int, np.ndarray] = {}

    async def score(client: SamplingClient) -> None:
        # Each teacher scores all its data in one call, so that the backend can batch them.
        own = [i for i, other in enumerate(teacher_clients_D) if other is client]
        scores.update(zip(own, await score_datums(client, [data_D[i] for i in own]), strict=True))

    await asyncio.gather(*map(score, {id(client): client for client in teacher_clients_D}.values()))
    means, _ = add_reverse_kl(
        data_D,
        trained_values(data_D, [scores[i] for i in range(len(data_D))], "teacher"),
        dataset_indices_D,
        kl_penalty_coef,
        kl_discount_factor,
    )
    return {name: mean.mean for name, mean in means.items()}


async def prepare_minibatch(
    env_group_builders_P: Sequence[EnvGroupBuilder],
    trajectory_groups_P: list[TrajectoryGroup],
    tokenizer: Tokenizer,
    dataset_indices_P: list[int],
    teacher_clients: list[SamplingClient],
    kl_penalty_coef: float,
    kl_discount_factor: float,
) -> tuple[list[tinker.Datum], dict[str, Any]]:
    """Returns data of finished groups with advantages from the teachers, and metrics.

    Prints the first group of each dataset. ``kl_penalty_coef=0`` ignores the teachers.
    """
    tags_P = [builder.logging_tags() for builder in env_group_builders_P]
    metrics: dict[str, Any] = dict(compute_trajectory_metrics(trajectory_groups_P, tags_P))
    for number in sorted(set(dataset_indices_P)):
        print_group(trajectory_groups_P[dataset_indices_P.index(number)], tokenizer)
    data_D, origins_D = assemble_training_data(
        trajectory_groups_P, compute_advantages(trajectory_groups_P)
    )
    if kl_penalty_coef > 0:
        numbers_D = [dataset_indices_P[origin.group] for origin in origins_D]
        clients_D = [teacher_clients[number] for number in numbers_D]
        metrics |= await incorporate_kl_penalty(
            data_D, clients_D, numbers_D, kl_penalty_coef, kl_discount_factor
        )
    return data_D, metrics


async def do_train_step_and_get_sampling_client(
    config: Config,
    i_batch: int,
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    service_client: Any,
    tokenizer: Tokenizer,
    env_group_builders_P: Sequence[EnvGroupBuilder],
    trajectory_groups_P: list[TrajectoryGroup],
    dataset_indices_P: list[int],
    teacher_clients: list[SamplingClient],
    store: Any = None,
) -> tuple[SamplingClient, dict[str, Any]]:
    """As ``rl.train.do_train_step_and_get_sampling_client``, with teachers."""
    coefs = config.kl_penalty_coef, config.kl_discount_factor
    groups = env_group_builders_P, trajectory_groups_P, tokenizer
    data_D, metrics = await prepare_minibatch(*groups, dataset_indices_P, teacher_clients, *coefs)
    client, trained = await train_on_data(config, i_batch, training_client, checkpoint_mgr, data_D)
    return client, metrics | trained


async def do_sync_training(
    start_batch: int,
    end_batch: int,
    num_batches: int,
    config: Config,
    training_client: TrainingClient,
    checkpoint_mgr: CheckpointManager,
    service_client: Any,
    evaluators: list[SamplingClientEvaluator],
    dataset: CompositeDataset,
    teacher_clients: list[SamplingClient],
    ml_logger: Logger,
    tokenizer: Tokenizer,
) -> None:
    """As ``rl.train.do_sync_training``, with one teacher for each dataset in ``dataset``."""
    session = CallerSession(
        config, training_client, ml_logger, start_batch, end_batch, evaluators, checkpoint_mgr
    )
    # The caller's teachers read the student's tokens, so no other prompt is rendered.
    tagged = TeacherDataset(dataset, [None] * len(teacher_clients))
    source = BatchSource(
        problem_batches(tagged, config.seed, start_batch, end_batch),
        CallerWorker(config, session.progress.sampling),
        config.num_substeps,
    )
    teachers = TeacherSignal(
        [Teacher(client) for client in teacher_clients],
        config.kl_penalty_coef,
        config.kl_discount_factor,
        config.reward_coef,
        config.center_teacher_kl,
    )
    await run_loop(session, source, teachers, tokenizer, num_batches)
