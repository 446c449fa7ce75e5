"""What self-distillation trains on: answers with the targets of a teacher that read more.

The student has answered a prompt; the teacher reads the same answer behind a prompt of its own,
which holds a demonstration, and says at each of the answer's tokens what it would expect there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tinker_cookbook.distillation.topk_targets import SoftDatum, TopK, ask_teacher, soft_datum
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.lazy_imports import lazy_module

if TYPE_CHECKING:
    import tinker
    import torch

    from tinker_cookbook.backends import SamplingClient
else:
    tinker = lazy_module("tinker")
    torch = lazy_module("torch")

__all__ = [
    "ReverseKL",
    "answer_datum",
    "build_reverse_kl_datums",
    "build_topk_distillation_datums",
    "demonstrated_targets",
    "reverse_kl_custom_loss",
]


def answer_datum(prompt: tinker.ModelInput, answer: Sequence[int]) -> tinker.Datum:
    """A datum of a prompt and an answer to it, with ``mask`` [T] 1 on the answer's tokens."""
    tokens = [*prompt.to_ints(), *answer]
    mask = np.zeros(len(tokens) - 1, np.float32)
    mask[prompt.length - 1 :] = 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
            "mask": tinker.TensorData.from_numpy(mask),
        },
    )


async def demonstrated_targets(
    data_D: Sequence[tinker.Datum],
    teacher_prompts_D: Sequence[tinker.ModelInput],
    teacher: SamplingClient,
    topk: int,
    max_context_length: int,
    vocab_size: int | None = None,
    skip_first_n_tokens: int = 3,
    concurrency: int = 64,
) -> tuple[list[SoftDatum], dict[str, float]]:
    """The data with the teacher's top ``topk`` as targets, and metrics.

    Args:
        data_D: Of :func:`answer_datum`: ``target_tokens`` [T] and ``mask`` [T].
        teacher_prompts_D: What the teacher reads before each answer.
        teacher: Knows the student's tokens.
        topk: Targets a position.
        max_context_length: Most tokens of teacher prompt and answer together; of an answer that
            is too long for it, the last tokens get no targets.
        vocab_size: The student's; targets beyond it are left out.
        skip_first_n_tokens: So many of an answer's first tokens get no targets: there a teacher
            that has the demonstration before its eyes tends to begin by speaking of it.
        concurrency: Answers that are scored at a time.

    ``sdft/num_datums``
        Answers of the batch.
    ``sdft/num_without_targets``
        Those that train nothing: shorter than ``skip_first_n_tokens``, or without room.
    ``sdft/teacher_truncated_count``
        Those whose end is left out for ``max_context_length``. Should be 0.
    ``sdft/total_completion_tokens``
        Tokens of all answers that have targets.
    ``sdft/mean_teacher_entropy``
        Of the targets, in nats a token; 0 where the teacher is certain.
    """
    limit = asyncio.Semaphore(concurrency)

    async def one(datum: tinker.Datum, prompt: tinker.ModelInput) -> tuple[SoftDatum, bool]:
        masked = np.flatnonzero(datum.loss_fn_inputs["mask"].to_numpy())
        if not masked.size:
            raise DataValidationError(
                "mask: got no token of an answer, expected at least one in each datum"
            )
        answer = datum.loss_fn_inputs["target_tokens"].to_numpy()[masked[0] :].tolist()
        room = max(0, max_context_length - prompt.length)
        kept = answer[:room]
        positions = masked[skip_first_n_tokens:]
        positions = positions[positions - masked[0] < len(kept)]
        rows = TopK(np.zeros((0, topk), np.int64), np.zeros((0, topk), np.float32))
        if positions.size:
            async with limit:
                text = prompt.append(tinker.EncodedTextChunk(tokens=kept))
                every = await ask_teacher(teacher, text, topk, first=prompt.length)
            at = positions - masked[0]
            rows = TopK(every.ids[at], every.logprobs[at]).within(vocab_size)
        return soft_datum(datum.model_input, positions, rows), len(kept) < len(answer)

    done = await asyncio.gather(*map(one, data_D, teacher_prompts_D))
    soft_D = [soft for soft, _ in done]
    return soft_D, _metrics(soft_D, sum(cut for _, cut in done))


def _metrics(soft_D: Sequence[SoftDatum], truncated: int) -> dict[str, float]:
    weights = [soft.datum.loss_fn_inputs["weights"].to_numpy() for soft in soft_D]
    q = np.concatenate([w[w.any(axis=-1)] for w in weights]).astype(np.float64)
    metrics = {
        "sdft/num_datums": float(len(soft_D)),
        "sdft/num_without_targets": float(sum(not w.any() for w in weights)),
        "sdft/teacher_truncated_count": float(truncated),
        "sdft/total_completion_tokens": float(len(q)),
    }
    if len(q):
        logs = np.log(q, out=np.zeros_like(q), where=q > 0)
        metrics["sdft/mean_teacher_entropy"] = float(-(q * logs).sum() / len(q))
    return metrics


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
    """Datums for ``cross_entropy`` with the teacher's distributions as targets, and metrics.

    ``metadata_D[i]["group_idx"]`` says which of ``teacher_prompts_P`` belongs to ``data_D[i]``;
    the rest is as in :func:`demonstrated_targets`. A position without targets has weights 0, so
    that ``weights > 0`` marks what is trained.
    """
    prompts_D = [teacher_prompts_P[_group(metadata)] for metadata in metadata_D]
    soft_D, metrics = await demonstrated_targets(
        data_D, prompts_D, teacher_client, topk, max_context_length, vocab_size, skip_first_n_tokens
    )
    return [soft.datum for soft in soft_D], metrics


build_reverse_kl_datums = build_topk_distillation_datums
"""The same datums: :func:`reverse_kl_custom_loss` reads the teacher's distribution from their
weights."""


def _group(metadata: Mapping[str, int]) -> int:
    return metadata["group_idx"]


def reverse_kl_custom_loss(
    data: list[tinker.Datum], logprobs_list: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """KL(student || teacher) over the teacher's top K, a sum over positions.

    With ``q`` the teacher's probabilities (the datum's weights) and ``p`` the student's, both
    renormalised over the K tokens::

        loss = sum over positions t, tokens k of  p_tk * (log p_tk - log q_tk)

    Where the forward KL makes the student cover all that the teacher would say, this one makes it
    leave what the teacher would not.

    Args:
        data: With ``weights`` [T, K]; 0 marks what is no target.
        logprobs_list: The student's log-probabilities [T, K] of the targets.

    ``sdft/reverse_kl_loss``
        The loss.
    ``sdft/reverse_kl_mean``
        The loss a position, in nats. Not below 0; at step 0 what the demonstration adds; falls.
    ``sdft/student_entropy_mean``
        Of ``p``, in nats. Near 0 all answers to a prompt are the same.
    """
    total = torch.zeros(())
    entropy, count = 0.0, 0
    for datum, logprobs in zip(data, logprobs_list, strict=True):
        q = datum.loss_fn_inputs["weights"].to_torch().to(logprobs.device)
        at = (q > 0).any(-1)
        present = q[at] > 0
        # A token that is no target takes no part: neither in the sum nor in the gradient.
        log_p = logprobs[at].masked_fill(~present, -torch.inf).log_softmax(-1)
        log_p = log_p.masked_fill(~present, 0.0)
        p = log_p.exp() * present
        log_q = torch.where(present, q[at], 1.0).log()
        total = total.to(logprobs.device) + (p * (log_p - log_q)).sum()
        entropy -= float((p * log_p).sum().detach())
        count += int(at.sum())
    metrics = {"sdft/reverse_kl_loss": float(total.detach())}
    if count:
        metrics["sdft/reverse_kl_mean"] = float(total.detach()) / count
        metrics["sdft/student_entropy_mean"] = entropy / count
    return total, metrics


class ReverseKL:
    """:func:`reverse_kl_custom_loss` for the training client, which may call it datum by datum: its
    values add up, but its means do not, and are left out."""

    group_size = 1
    trained_only = True

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of these datums."""
        return reverse_kl_custom_loss(data, logprobs)[0], {}
