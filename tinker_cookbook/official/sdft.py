"""Parts of ``distillation.sdft`` for loops of user code."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.distillation.sdft_targets import (
    CONCURRENCY,
    TeacherText,
    demonstrated_targets,
)
from tinker_cookbook.utils.imports import tinker


async def build_topk_distillation_datums(
    data_D: list[tinker.Datum],
    metadata_D: list[dict[str, int]],
    teacher_client: SamplingClient,
    teacher_prompts_P: list[tinker.ModelInput],
    topk: int = 20,
    max_context_length: int = 32768,
    vocab_size: int | None = None,
    skip_first_n_tokens: int = 3,
) -> tuple[list[tinker.Datum], dict[str, float]]:
    """Returns datums for ``cross_entropy`` with the teacher's top K as targets, and metrics.

    ``metadata_D[i]["group_idx"]`` is the index of the teacher prompt of ``data_D[i]``. A position
    without targets has weights 0.
    """
    prompts_D = [teacher_prompts_P[metadata["group_idx"]] for metadata in metadata_D]
    soft_D, metrics = await demonstrated_targets(
        data_D, prompts_D, teacher_client, topk, max_context_length, vocab_size, skip_first_n_tokens
    )
    return [soft.datum for soft in soft_D], {**metrics, "sdft/topk": float(topk)}


@functools.wraps(build_topk_distillation_datums)
async def build_reverse_kl_datums(
    *args: Any, **kwargs: Any
) -> tuple[list[tinker.Datum], dict[str, float]]:
    """Returns the same data for :func:`reverse_kl_custom_loss`, and one more metric:
    ``sdft/total_completion_positions``, the number of trained positions."""
    data, metrics = await build_topk_distillation_datums(*args, **kwargs)
    metrics["sdft/total_completion_positions"] = metrics["sdft/total_completion_tokens"]
    return data, metrics


async def compute_sdft_advantages(
    data_D: list[tinker.Datum],
    metadata_D: list[dict[str, int]],
    teacher_client: SamplingClient,
    teacher_prompts_P: list[tinker.ModelInput],
    max_context_length: int = 32768,
) -> dict[str, float]:
    """Replaces ``advantages`` by the teacher's log-probability minus the student's, per token.

    With the loss ``importance_sampling``, this minimises the estimate of KL(student || teacher)
    from the sampled tokens. ``data_D`` is changed in place; it has ``target_tokens``, ``mask`` and
    ``logprobs`` [T], the student's in nats. Tokens beyond ``max_context_length`` get advantage 0.

    Returns ``sdft/num_datums``, ``sdft/teacher_truncated_count`` and, as sums over scored tokens
    divided by all tokens with mask 1, ``sdft/mean_advantage`` (about minus the KL; rises to 0),
    ``sdft/mean_teacher_lp`` and ``sdft/mean_student_lp``.
    """
    limit = asyncio.Semaphore(CONCURRENCY)

    async def one(datum: tinker.Datum, prompt: tinker.ModelInput) -> tuple[bool, list[float]]:
        text = TeacherText.of(datum, prompt, max_context_length)
        received: list[float | None] = []
        if prompt.length <= max_context_length:
            async with limit:
                received = (await teacher_client.compute_logprobs(text.tokens))[prompt.length :]
        scores = np.array(received, np.float64)
        # The teacher may have returned fewer scores than tokens.
        scored = text.rows < len(scores)
        positions = text.positions[scored]
        teacher = scores[text.rows[scored]]
        # A score of None counts as log-probability 0, as in the official package.
        teacher = np.where(np.isnan(teacher), 0.0, teacher)
        inputs = datum.loss_fn_inputs
        student = inputs["logprobs"].to_numpy()[positions]
        advantages = np.zeros(datum.model_input.length, np.float32)
        advantages[positions] = teacher - student
        inputs["advantages"] = tinker.TensorData.from_numpy(advantages)
        # An answer without room after the teacher's prompt has no score and is excluded from means.
        count = inputs["mask"].to_numpy().sum() if text.tokens.length > prompt.length else 0.0
        return text.cut, [float(v) for v in (advantages.sum(), teacher.sum(), student.sum(), count)]

    prompts_D = [teacher_prompts_P[metadata["group_idx"]] for metadata in metadata_D]
    done = await asyncio.gather(*map(one, data_D, prompts_D))
    metrics = {
        "sdft/num_datums": float(len(data_D)),
        "sdft/teacher_truncated_count": float(sum(cut for cut, _ in done)),
    }
    sums = np.array([sums for _, sums in done]).reshape(-1, 4).sum(axis=0)
    advantage, teacher, student, count = sums.tolist()
    if count:
        metrics["sdft/mean_advantage"] = advantage / count
        metrics["sdft/mean_teacher_lp"] = teacher / count
        metrics["sdft/mean_student_lp"] = student / count
    return metrics
