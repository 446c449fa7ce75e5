"""Targets of self-distillation: the teacher scores the student's answers after its own prompt.

The student has answered a prompt. The teacher reads the same answer after a prompt with a
demonstration, and predicts each of the answer's tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.distillation.topk_distributions import (
    SoftDatum,
    TopK,
    score_with_topk,
    soft_datum,
)
from tinker_cookbook.utils.imports import tinker, torch

CONCURRENCY = 64
"""Number of answers that the teacher scores concurrently."""


def masked_datum(
    model_input: tinker.ModelInput,
    target_tokens: npt.NDArray[np.int64],
    mask: npt.NDArray[np.float32],
) -> tinker.Datum:
    """Returns a datum with ``target_tokens`` [T] and ``mask`` [T], 1 on the answer's tokens."""
    fields = {"target_tokens": target_tokens, "mask": mask}
    return tinker.Datum(
        model_input=model_input,
        loss_fn_inputs={
            name: tinker.TensorData.from_numpy(values) for name, values in fields.items()
        },
    )


def answer_datum(prompt: tinker.ModelInput, answer: Sequence[int]) -> tinker.Datum:
    """Returns the masked datum of a prompt and its answer."""
    tokens = [*prompt.to_ints(), *answer]
    mask = np.zeros(len(tokens) - 1, np.float32)
    # Position i predicts token i + 1: the prompt's last position predicts the first answer token.
    mask[prompt.length - 1 :] = 1
    model_input = tinker.ModelInput.from_ints(tokens[:-1])
    return masked_datum(model_input, np.array(tokens[1:], np.int64), mask)


@dataclass(frozen=True)
class TeacherText:
    """An answer after the teacher's prompt.

    The answer is everything from the first token with ``mask`` > 0 to the end of the datum. It may
    have tokens with mask 0 (observations between actions, actions that do not count): the teacher
    reads them as context, but they get no targets.
    """

    tokens: tinker.ModelInput
    """The teacher's prompt and the part of the answer that fits."""
    positions: npt.NDArray[np.int64]
    """Positions [N] in the datum with ``mask`` > 0 and tokens that fit."""
    rows: npt.NDArray[np.int64]
    """Index [N] of each position's token in the answer."""
    cut: bool
    """Whether the answer was truncated."""

    @classmethod
    def of(cls, datum: tinker.Datum, prompt: tinker.ModelInput, most: int) -> TeacherText:
        """Returns the text with at most ``most`` tokens, unless the prompt alone is longer."""
        # Tokens before the first action are the student's prompt, which the teacher must not read.
        masked = np.flatnonzero(datum.loss_fn_inputs["mask"].to_numpy() > 0)
        start = int(masked[0]) if masked.size else datum.model_input.length
        answer = datum.loss_fn_inputs["target_tokens"].to_numpy()[start:]
        # Truncate a long answer at its end, so that the remaining tokens have their full context.
        kept = answer[: max(0, most - prompt.length)].tolist()
        positions = masked[masked - start < len(kept)]
        tokens = prompt.append(tinker.EncodedTextChunk(tokens=kept)) if kept else prompt
        return cls(tokens, positions, positions - start, len(kept) < len(answer))


async def demonstrated_targets(
    data_D: Sequence[tinker.Datum],
    teacher_prompts_D: Sequence[tinker.ModelInput],
    teacher: SamplingClient,
    topk: int,
    max_context_length: int,
    vocab_size: int | None = None,
    skip_first_n_tokens: int = 3,
    concurrency: int = CONCURRENCY,
) -> tuple[list[SoftDatum], dict[str, float]]:
    """Returns the data with the teacher's top ``topk`` as targets, and metrics.

    The data have ``target_tokens`` [T] and ``mask`` [T], possibly with several segments of
    actions. There are no targets on the first ``skip_first_n_tokens`` tokens with mask 1, on tokens
    beyond ``max_context_length`` tokens of teacher prompt and answer, and for token ids that the
    student does not have (``vocab_size``).

    Metrics are the numbers of answers (``sdft/num_datums``), answers without any target
    (``sdft/num_without_targets``) and truncated answers
    (``sdft/teacher_truncated_count``, should be 0); the numbers of tokens without a distribution in
    the teacher's response (``sdft/teacher_missing_count``, should be 0) and with targets
    (``sdft/total_completion_tokens``); and ``sdft/mean_teacher_entropy`` of the targets, in nats.
    """
    limit = asyncio.Semaphore(concurrency)

    async def one(datum: tinker.Datum, prompt: tinker.ModelInput) -> tuple[SoftDatum, bool, int]:
        text = TeacherText.of(datum, prompt, max_context_length)
        # Skip the first tokens, in which the teacher tends to mention the demonstration.
        positions, at = text.positions[skip_first_n_tokens:], text.rows[skip_first_n_tokens:]
        # If the teacher's prompt fills the context, the answer gets no targets.
        rows = TopK(np.zeros((0, topk), np.int64), np.zeros((0, topk), np.float32))
        missing = 0
        if prompt.length <= max_context_length:
            async with limit:
                every, _ = await score_with_topk(
                    teacher, text.tokens, topk, first=prompt.length, complete=False
                )
            # A token without a distribution in the response is skipped and counted.
            present = every.present[at]
            positions, at, missing = positions[present], at[present], int((~present).sum())
            rows = every[at].within(vocab_size)
        return soft_datum(datum.model_input, positions, rows), text.cut, missing

    done = await asyncio.gather(*map(one, data_D, teacher_prompts_D))
    return [soft for soft, _, _ in done], _target_metrics(done)


def _target_metrics(done: Sequence[tuple[SoftDatum, bool, int]]) -> dict[str, float]:
    """Computes metrics from (datum, whether it is truncated, number of missing distributions)."""
    # Rows of zeros have no targets. Other rows are q, which sums to 1.
    weights = [soft.datum.loss_fn_inputs["weights"].to_numpy() for soft, _, _ in done]
    q = np.concatenate([w[w.any(axis=-1)] for w in weights]).astype(np.float64)
    metrics = {
        "sdft/num_datums": float(len(done)),
        "sdft/num_without_targets": float(sum(not w.any() for w in weights)),
        "sdft/teacher_truncated_count": float(sum(cut for _, cut, _ in done)),
        "sdft/teacher_missing_count": float(sum(missing for _, _, missing in done)),
        "sdft/total_completion_tokens": float(len(q)),
    }
    if len(q):
        logs = np.log(q, out=np.zeros_like(q), where=q > 0)
        metrics["sdft/mean_teacher_entropy"] = float(-(q * logs).sum() / len(q))
    return metrics


def reverse_kl_custom_loss(
    data: list[tinker.Datum], logprobs_list: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Computes KL(student || teacher) over the teacher's top K, a sum over positions.

    With ``q`` the teacher's probabilities (the datum's weights [T, K], 0 for no target) and ``p``
    the student's (``logprobs_list`` [T, K]), both renormalised over the K tokens::

        loss = sum over positions t, tokens k of  p_tk * (log p_tk - log q_tk)

    The forward KL makes the student cover all of the teacher's distribution; this loss makes it
    avoid what is improbable for the teacher. ``sdft/reverse_kl_mean`` is the loss per position, at
    step 0 the effect of the demonstration; near 0 ``sdft/student_entropy_mean`` (of ``p``, in
    nats) all answers to a prompt are the same.
    """
    total = torch.zeros(())
    entropy, count = 0.0, 0
    for datum, logprobs in zip(data, logprobs_list, strict=True):
        # The weights are the teacher's probabilities; rows of zeros are not trained.
        q = datum.loss_fn_inputs["weights"].to_torch().to(logprobs.device)
        at = (q > 0).any(-1)
        present = q[at] > 0
        # Mask tokens that are not targets, in the sum and in the gradient.
        log_p = logprobs[at].masked_fill(~present, -torch.inf).log_softmax(-1)
        log_p = log_p.masked_fill(~present, 0.0)
        p = log_p.exp() * present
        log_q = torch.where(present, q[at], 1.0).log()
        total = total.to(logprobs.device) + (p * (log_p - log_q)).sum()
        # Detached, because it is only a metric.
        entropy -= float((p * log_p).sum().detach())
        count += int(at.sum())
    metrics = {
        "sdft/reverse_kl_loss": float(total.detach()),
        "sdft/reverse_kl_positions": float(count),
    }
    if count:
        metrics["sdft/reverse_kl_mean"] = float(total.detach()) / count
        metrics["sdft/student_entropy_mean"] = entropy / count
    return total, metrics


class ReverseKL:
    """Loss for the training client as a sum over datums, without means, which are not additive."""

    # The loss is a sum over datums that reads only trained positions.
    group_size = 1
    trained_only = True

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Returns the loss of these datums."""
        return reverse_kl_custom_loss(data, logprobs)[0], {}
