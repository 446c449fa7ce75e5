"""DPO, IPO and SimPO losses on pairs of answers.

With ``lp`` the policy's and ``ref`` the reference's log-probability of a whole answer (the sum over
its trained tokens), and ``h = (lp_chosen - ref_chosen) - (lp_rejected - ref_rejected)`` of a pair:

=========  ===================================================================================
dpo        ``-log sigmoid(beta h)``; with label smoothing ``e`` (conservative DPO)
           ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``       (arXiv 2305.18290, and
           its authors' note of 2023, https://ericmitchell.ai/cdpo.pdf)
ipo        ``(h - 1 / (2 beta))**2``                                        (arXiv 2310.12036)
simpo      ``-log sigmoid(beta (mean lp_chosen - mean lp_rejected) - gamma)``: means over the
           answer's tokens, and no reference                                (arXiv 2405.14734)
=========  ===================================================================================

The loss of a batch is the mean over its pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import ConfigurationError, nearest
from tinker_cookbook.utils.imports import tinker, torch

PairLossName = Literal["dpo", "ipo", "simpo"]


@dataclass(frozen=True)
class PairLoss:
    """Pairwise loss; ``Config`` of ``train_dpo`` documents its settings."""

    name: PairLossName = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5

    def check(self) -> None:
        """Raises ``ConfigurationError`` for the first invalid setting."""
        names = get_args(PairLossName)
        if self.name not in names:
            raise ConfigurationError(
                f"dpo_loss: got {self.name!r}, expected one of {', '.join(names)}"
                f"{nearest(self.name, names)}"
            )
        if not 0 < self.beta < math.inf:
            raise ConfigurationError(f"dpo_beta: got {self.beta}, expected a number above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigurationError(
                f"label_smoothing: got {self.label_smoothing}, expected 0 to less than 0.5: at 0.5 "
                "the labels would carry no information"
            )
        if self.label_smoothing and self.name != "dpo":
            raise ConfigurationError(
                f"label_smoothing: got {self.label_smoothing} with dpo_loss={self.name}, which has "
                "no such setting; leave it out or set dpo_loss=dpo"
            )
        if not 0 <= self.gamma < math.inf:
            raise ConfigurationError(f"simpo_gamma: got {self.gamma}, expected a number from 0")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses log-probabilities of a reference model."""
        return self.name != "simpo"

    def of_rewards(self, difference: torch.Tensor) -> torch.Tensor:
        """Computes the loss [P] of pairs from the differences [P] of their rewards (with beta)."""
        log_sigmoid = torch.nn.functional.logsigmoid
        if self.name == "ipo":
            # IPO is defined on h, but the rewards include beta.
            return (difference / self.beta - 1 / (2 * self.beta)).square()
        if self.name == "simpo":
            return -log_sigmoid(difference - self.gamma)
        smoothing = self.label_smoothing
        # Conservative DPO: assume that a share of the labels is wrong.
        loss = -(1 - smoothing) * log_sigmoid(difference)
        return loss - smoothing * log_sigmoid(-difference) if smoothing else loss


class PairObjective:
    """Pairwise loss of a batch for ``forward_backward_custom``.

    ``data`` are P pairs as 2P datums, alternating chosen and rejected, and ``reference`` [2P] the
    reference's log-probability of each answer, zeros without a reference.
    """

    # The loss is a sum over pairs and does not read prompt tokens, so the client may call it with
    # some of the pairs and with log-probabilities of trained tokens only.
    group_size = 2
    trained_only = True

    def __init__(
        self, loss: PairLoss, data: Sequence[tinker.Datum], reference: npt.NDArray[np.float64]
    ) -> None:
        self._loss = loss
        # Look up by identity, because the client may call the loss with some of the pairs.
        self._reference = {
            id(datum): float(value) for datum, value in zip(data, reference, strict=True)
        }
        # Mean over the whole batch, even if a call gets only a part of it.
        self._num_pairs = len(data) // 2

    def __call__(
        self, data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes the loss of whole pairs; ``logprobs`` holds one tensor [T] per datum."""
        rewards = []
        for datum, values in zip(data, logprobs, strict=True):
            mask = torch.as_tensor(_mask_of(datum), dtype=values.dtype, device=values.device)
            score = (values * mask).sum()
            if self._loss.needs_reference:
                score = score - self._reference[id(datum)]
            else:
                # Without a reference, the mean over tokens makes answers of different lengths
                # comparable.
                score = score / mask.sum().clamp(min=1)
            rewards.append(self._loss.beta * score)
        stacked = torch.stack(rewards)
        losses = self._loss.of_rewards(stacked[::2] - stacked[1::2])
        return losses.sum() / self._num_pairs, {}


def answer_scores(
    data: Sequence[tinker.Datum], logprobs: Sequence[Any], *, mean: bool = False
) -> npt.NDArray[np.float64]:
    """Computes each answer's log-probability [N]: the sum (or mean) over trained tokens."""
    scores = np.empty(len(data))
    for i, (datum, values) in enumerate(zip(data, logprobs, strict=True)):
        array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
        # float64, because sums over long answers lose digits in float32.
        trained = np.asarray(array, dtype=np.float64)[_mask_of(datum)]
        scores[i] = trained.mean() if mean and trained.size else trained.sum()
    return scores


def answer_rewards(
    loss: PairLoss,
    data: Sequence[tinker.Datum],
    reference: npt.NDArray[np.float64],
    logprobs: Sequence[Any],
) -> npt.NDArray[np.float64]:
    """Computes the implicit reward [N] of each answer, as in :func:`pair_metrics`."""
    scores = answer_scores(data, logprobs, mean=not loss.needs_reference)
    return loss.beta * (scores - reference)


def pair_metrics(
    loss: PairLoss,
    data: Sequence[tinker.Datum],
    reference: npt.NDArray[np.float64],
    logprobs: Sequence[Any],
    prefix: str = "",
) -> dict[str, float]:
    """Computes the metrics of a batch: means over its pairs (docs/preferences.md).

    With the implicit reward ``r = beta (lp - ref)`` of an answer (for simpo ``beta * mean lp``):
    ``dpo_loss`` (starts at ln 2 for dpo, at ``1 / (4 beta**2)`` for ipo), ``accuracy`` (share of
    pairs with ``r_chosen > r_rejected``), ``margin`` (mean of their difference), and the means
    ``chosen_reward`` and ``rejected_reward``, which often both fall.
    """
    rewards = answer_rewards(loss, data, reference, logprobs)
    values = reward_metrics(loss, rewards[::2], rewards[1::2])
    return {f"{prefix}{name}": value for name, value in values.items()}


def reward_metrics(
    loss: PairLoss, chosen: npt.NDArray[np.float64], rejected: npt.NDArray[np.float64]
) -> dict[str, float]:
    """Computes the metrics of :func:`pair_metrics` from the rewards [P] of P pairs."""
    # A difference below 1e-3 nats is float32 rounding and counts as half right, so that accuracy
    # starts at 0.5.
    difference = chosen - rejected
    decided = np.abs(difference) > 1e-3 * loss.beta
    right = np.where(decided, difference > 0, 0.5)
    values = {
        "dpo_loss": loss.of_rewards(torch.from_numpy(difference)).numpy(),
        "accuracy": right,
        "margin": difference,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return {name: float(of.mean()) for name, of in values.items()}


def _mask_of(datum: tinker.Datum) -> npt.NDArray[np.bool_]:
    return datum.loss_fn_inputs["weights"].to_numpy() != 0
