"""Truncated importance sampling: corrects for a sampler that computes other probabilities.

A separate sampler (vLLM, another precision) assigns the sampled tokens probabilities ``q`` that
differ slightly from the trainer's, ``p``, for the same weights. With this ratio, truncated
at ``cap``, the advantage of a token becomes ``A * min(p / q, cap)``. The ratio in the loss then
compares the trainer's policies before and after a step. This is the token-level correction of TRL
(``vllm_importance_sampling_cap``) and verl (``tis_imp_ratio_cap``); the source is Yao et al. 2025,
"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinker_cookbook.backends import TrainingClient
from tinker_cookbook.rl.data_processing import SAMPLER_LOGPROBS, data_for_loss
from tinker_cookbook.rl.loop.adjuster import logprobs_of
from tinker_cookbook.utils.imports import tinker


@dataclass
class RatioStatistics:
    """Ratios of the trained tokens before they are truncated."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    truncated: int = 0

    def add(self, ratios: np.ndarray, cap: float) -> None:
        """Counts the ratios [N] of trained tokens."""
        self.count += ratios.size
        self.total += float(ratios.sum())
        self.largest = max(self.largest, float(ratios.max(initial=0.0)))
        self.truncated += int(np.count_nonzero(ratios > cap))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics; empty if no token is trained."""
        if not self.count:
            return {}
        return {
            "optim/importance_ratio": self.total / self.count,
            "optim/importance_ratio_max": self.largest,
            "optim/frac_truncated": self.truncated / self.count,
        }


async def truncate_importance(
    client: TrainingClient,
    data_D: Sequence[tinker.Datum],
    cap: float,
    statistics: RatioStatistics,
) -> list[tinker.Datum]:
    """Returns the data with corrected advantages and the trainer's own log-probabilities.

    It costs a forward pass. The sampler's log-probabilities stay in ``SAMPLER_LOGPROBS``.
    """
    if not data_D:
        return []
    output = await client.forward(data_for_loss(data_D, "ppo"), "ppo")
    out = []
    for datum, logprobs in zip(data_D, logprobs_of(output), strict=True):
        fields = datum.loss_fn_inputs
        sampler, mask = fields["logprobs"], fields["mask"].to_numpy()
        trainer = np.where(mask != 0, logprobs.to_numpy(), 0).astype(np.float32)
        # A ratio that overflows is above every cap.
        with np.errstate(over="ignore"):
            ratios = np.exp((trainer - sampler.to_numpy()).astype(np.float64))
        statistics.add(ratios[mask != 0], cap)
        weights = np.minimum(ratios, cap)
        advantages = (fields["advantages"].to_numpy() * weights).astype(np.float32)
        corrected = {
            "advantages": tinker.TensorData.from_numpy(advantages),
            "logprobs": tinker.TensorData.from_numpy(trainer),
            SAMPLER_LOGPROBS: sampler,
        }
        out.append(replace(datum, loss_fn_inputs={**fields, **corrected}))
    return out
