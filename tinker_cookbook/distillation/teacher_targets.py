"""On-policy distillation towards whole distributions: the reverse KL of each token's place.

A teacher that judges the token which the student happened to draw gives an estimate of
``KL(student || teacher)`` there, and a noisy one. Asked for its ``K`` most probable tokens it gives
the KL itself, but for what lies beyond them, which counts as one more outcome::

    loss = coef * sum over positions t, outcomes k of  p_tk * (log p_tk - log q_tk)

with ``p`` the student's probabilities and ``q`` the teacher's (generalised knowledge distillation,
Agarwal et al. 2023, arXiv 2306.13649, with samples of the student alone).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.distillation.teachers import Teacher, TeacherSignal
from tinker_cookbook.distillation.topk_targets import TopK, ask_about_tokens
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.model_inputs import whole_sequence

if TYPE_CHECKING:
    import tinker
    import torch
    from tinker import types

    from tinker_cookbook.backends import Future, TrainingClient
    from tinker_cookbook.rl.config import PolicyTrainingConfig
else:
    tinker = lazy_module("tinker")
    torch = lazy_module("torch")

__all__ = ["DistributionLoss", "DistributionSignal", "JudgingTeacher"]

_IDS, _PROBABILITIES = "teacher_ids", "teacher_probabilities"

_LEAST = 1e-6
"""Of float32 probabilities that add up to 1: less than this cannot be told from none."""


@dataclass(frozen=True)
class JudgingTeacher(Teacher):
    """Leaves on each datum what it would have said: its ``k`` most probable tokens of each place.

    ``vocab_size`` is the student's: a teacher may know more tokens.
    """

    k: int = 20
    vocab_size: int | None = None

    async def _ask(self, data_D: Sequence[tinker.Datum]) -> list[npt.NDArray[np.float64]]:
        return list(await asyncio.gather(*map(self._judge, data_D)))

    async def _judge(self, datum: tinker.Datum) -> npt.NDArray[np.float64]:
        topk, logprobs = await ask_about_tokens(self.client, whole_sequence(datum), self.k)
        trained = datum.loss_fn_inputs["mask"].to_numpy() != 0
        rows = TopK(topk.ids[trained], topk.logprobs[trained]).within(self.vocab_size)
        ids = np.zeros((len(trained), self.k), np.int64)
        q = np.zeros((len(trained), self.k), np.float32)
        ids[trained], q[trained] = rows.ids, np.exp(rows.logprobs)
        datum.loss_fn_inputs[_IDS] = tinker.TensorData.from_numpy(ids)
        datum.loss_fn_inputs[_PROBABILITIES] = tinker.TensorData.from_numpy(q)
        return logprobs


class DistributionSignal(TeacherSignal):
    """Trains on what :class:`JudgingTeacher` left; the advantages only say whether there is any.

    The metrics are those of the sampled tokens, as with any other teacher.
    """

    def submit(
        self, client: TrainingClient, data_D: Sequence[tinker.Datum], config: PolicyTrainingConfig
    ) -> Future[types.ForwardBackwardOutput]:
        """One pass under autograd."""
        data = [_with_targets(datum) for datum in data_D]
        return client.forward_backward_custom(data, DistributionLoss(self._coef))

    def trained_logprobs(self, output: types.ForwardBackwardOutput) -> list[Any]:
        """Of the sampled tokens, which stand behind the teacher's."""
        return [values.to_numpy()[:, -1] for values in super().trained_logprobs(output)]


def _with_targets(datum: tinker.Datum) -> tinker.Datum:
    """``target_tokens`` [T, K + 1]: the teacher's, and the sampled one, which has no weight."""
    inputs = datum.loss_fn_inputs
    sampled = inputs["target_tokens"].to_numpy()[:, None]
    ids, q = inputs[_IDS].to_numpy(), inputs[_PROBABILITIES].to_numpy()
    fields = {
        "target_tokens": np.concatenate([ids, sampled], axis=1),
        "weights": np.concatenate([q, np.zeros_like(q[:, :1])], axis=1),
    }
    arrays = {name: tinker.TensorData.from_numpy(array) for name, array in fields.items()}
    return replace(datum, loss_fn_inputs=arrays)


class DistributionLoss:
    """The loss above, for ``forward_backward_custom``; ``weights`` [T, K] are ``q``, 0 for none."""

    group_size = 1
    trained_only = True

    def __init__(self, coef: float = 1.0) -> None:
        self._coef = coef

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of these datums, summed over their positions."""
        total = logprobs[0].new_zeros(())
        for datum, log_p in zip(data, logprobs, strict=True):
            q = datum.loss_fn_inputs["weights"].to_torch().to(log_p.device)
            at = (q > 0).any(-1)
            total = total + _reverse_kl(log_p[at], q[at])
        return self._coef * total, {}


def _reverse_kl(log_p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Over the tokens that ``q`` [N, K] gives a probability, and one outcome for all others."""
    present = q > 0
    log_p = log_p.masked_fill(~present, 0.0)
    p = log_p.exp() * present
    inside = (p * (log_p - torch.where(present, q, 1.0).log())).sum()
    p_rest = (1 - p.sum(-1)).clamp_min(_LEAST)
    q_rest = (1 - q.sum(-1)).clamp_min(_LEAST)
    return inside + (p_rest * (p_rest / q_rest).log()).sum()
