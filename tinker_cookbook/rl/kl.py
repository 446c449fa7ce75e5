"""How far apart two policies are on sampled tokens, and the penalty that keeps them close.

All estimates are means over the trained action tokens of a batch (``mask`` of the datums), in nats
a token, from log-probabilities of the sampled tokens at temperature 1. With ``d`` the log of the
ratio of the sampling policy to the other one at each token (Schulman 2020,
http://joschu.net/blog/kl-approx.html):

- v1 is ``mean(d)``: unbiased for KL(sampler || other), of high variance, may be below 0
- v2 is ``mean(d**2) / 2``: biased, of low variance, never below 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.loop.adjuster import (
    Adjustment,
    AdvantageAdjuster,
    Mean,
    RolloutData,
    advantages_of,
    kl_is_significant,
)
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.model_inputs import score_datums

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient
else:
    tinker = lazy_module("tinker")

__all__ = [
    "KLPenalty",
    "add_penalty",
    "add_to_advantages",
    "check_penalty",
    "compute_kl_sample_train",
    "compute_post_kl",
    "discounted_future_sum_vectorized",
    "incorporate_kl_penalty",
    "post_kl_metrics",
    "sampled_logprobs",
    "trained_values",
]

_Array = npt.NDArray[np.float64]


def compute_kl_sample_train(
    data_D: Sequence[tinker.Datum], training_logprobs_D: Sequence[Any]
) -> dict[str, float]:
    """Metrics of the sampler against the learner, from the logprobs that the update computed.

    ``optim/kl_sample_train_v1``
        KL(sampler || learner), v1. Starts at 0 up to rounding (1e-6 in float32, some 1e-3 in
        bfloat16), with either sign. On-policy it stays there; off-policy it grows with the age of
        the data. Above 0.01 training tends to become unstable. Clearly above 0 at the first step
        means that sampler and learner disagree about the model.
    ``optim/kl_sample_train_v2``
        The same, v2: never below 0, and not blind where positive and negative differences cancel.
        Far above v1 it tells of a few tokens that moved a lot.
    ``optim/entropy``
        Mean of ``-logprob`` of the sampled tokens: the sampler's entropy in nats a token if it
        draws at temperature 1 from the whole vocabulary. Not below 0, and at most the logarithm
        of the vocabulary's size. Starts where the model is (0.2 to 2 for most) and falls as it
        becomes certain. Near 0 all samples of a group are the same, so nothing is learned any
        more; a steep rise means that the text falls apart.

    Args:
        data_D: As ``trajectory_to_data`` makes them, with their ``mask``.
        training_logprobs_D: The learner's log-probabilities of the targets, [T] for each datum:
            arrays, tensors or ``TensorData``.

    Returns:
        The metrics, or nothing where no token is trained (a batch of masked turns, say): there is
        no mean over nothing.
    """
    learner_D = [_as_array(logprobs) for logprobs in training_logprobs_D]
    sampled = sampled_logprobs(data_D)
    difference = sampled - trained_values(data_D, learner_D, "training_logprobs_D")
    if not difference.size:
        return {}
    return {
        "optim/kl_sample_train_v1": float(difference.mean()),
        "optim/kl_sample_train_v2": float(np.square(difference).mean() / 2),
        "optim/entropy": float(-sampled.mean()),
    }


async def compute_post_kl(
    data_D: Sequence[tinker.Datum], post_sampling_client: SamplingClient
) -> dict[str, float]:
    """Metrics of the policy that sampled against the one after the update, on the same tokens.

    ``kl_pre_post_v1``
        KL(before || after), v1: how far one step moved the policy. 0 only if the learning rate
        is. Usually between 1e-5 and 1e-2; above 0.1 the step is too large.
    ``kl_pre_post_v2``
        The same, v2; never below 0.

    Costs a forward pass over the batch. Nothing is returned where no token is trained.
    """
    return post_kl_metrics(data_D, await score_datums(post_sampling_client, data_D))


def post_kl_metrics(data_D: Sequence[tinker.Datum], after_D: Sequence[_Array]) -> dict[str, float]:
    """As ``compute_post_kl``, from the log-probabilities [T] of each datum after the update."""
    difference = sampled_logprobs(data_D) - trained_values(data_D, after_D, "post_sampling_client")
    if not difference.size:
        return {}
    return {
        "kl_pre_post_v1": float(difference.mean()),
        "kl_pre_post_v2": float(np.square(difference).mean() / 2),
    }


async def incorporate_kl_penalty(
    data_D: Sequence[tinker.Datum],
    base_sampling_client: SamplingClient,
    kl_penalty_coef: float,
    kl_discount_factor: float = 0.0,
) -> dict[str, float]:
    """Lowers the advantages of tokens by which the policy leaves the reference; changes ``data_D``.

    With ``d = logprob of the sampler - logprob of the reference`` and its mean over the batch::

        advantages += coef * mask * (mean(d) - d)

    The mean is a baseline: the penalty shifts weight between tokens and adds up to 0. With a
    discount factor > 0 a token also answers for those after it in its datum: its penalty becomes
    the sum over them, each further position counting by one more factor.

    ``kl_policy_base``
        KL(sampler || reference), v1: ``mean(d)``. Starts at 0 up to rounding if the reference is
        the model that training began from, and rises as the policy moves; where it levels off
        depends on the coefficient. Above some 0.1 to 1 the text may differ in kind: raise the
        coefficient. Clearly below 0 it is an error: the reference is another model, or samples
        are drawn at another temperature than 1.

    Nothing is changed or returned where no token is trained.
    """
    check_penalty(kl_penalty_coef, kl_discount_factor)
    base_D = await score_datums(base_sampling_client, data_D)
    mean, _ = add_penalty(data_D, base_D, kl_penalty_coef, kl_discount_factor)
    return {"kl_policy_base": mean.mean} if mean.count else {}


class KLPenalty(AdvantageAdjuster):
    """Holds the policy near a reference, as ``incorporate_kl_penalty`` says.

    The penalty is centred over the data, so all groups of an iteration must be among them.
    """

    def __init__(self, reference: SamplingClient, coef: float, discount: float = 0.0) -> None:
        self._reference, self._coef, self._discount = reference, coef, discount

    async def adjust(self, rollouts: RolloutData) -> Adjustment:
        """Lowers the advantages of tokens by which the policy leaves the reference."""
        rewarded = any(values.any() for values in advantages_of(rollouts.data_D))
        check_penalty(self._coef, self._discount)
        reference_D = await score_datums(self._reference, rollouts.data_D)
        mean, penalty = add_penalty(rollouts.data_D, reference_D, self._coef, self._discount)
        means = {"kl_policy_base": mean} if mean.count else {}
        return Adjustment(rewarded or kl_is_significant(penalty, self._coef), means)


def add_penalty(
    data_D: Sequence[tinker.Datum], reference_D: Sequence[_Array], coef: float, discount: float
) -> tuple[Mean, _Array]:
    """As ``incorporate_kl_penalty``, from the reference's log-probabilities [T] of each datum.

    Returns the KL, and what was added to the advantages of the trained tokens.
    """
    difference = sampled_logprobs(data_D) - trained_values(
        data_D, reference_D, "base_sampling_client"
    )
    if not difference.size:
        return Mean(), difference
    mean = Mean(float(difference.sum()), difference.size)
    centred = coef * (float(difference.mean()) - difference)
    return mean, add_to_advantages(data_D, centred, discount)


def add_to_advantages(
    data_D: Sequence[tinker.Datum], values: _Array, discount: float = 0.0
) -> _Array:
    """Adds values to the advantages of trained tokens; changes ``data_D``.

    Args:
        data_D: As ``trajectory_to_data`` makes them.
        values: [N], for the trained tokens of all data in order.
        discount: Above 0 a token's value becomes the sum over those from it on in its datum, each
            further position counting by one more factor.

    Returns:
        What was added [N].
    """
    masks_D = [_field(datum, "mask") for datum in data_D]
    ends = np.cumsum([np.count_nonzero(mask) for mask in masks_D])
    added = [np.empty(0)]
    for datum, mask, part in zip(data_D, masks_D, np.split(values, ends[:-1]), strict=True):
        here = np.zeros(len(mask))
        here[mask != 0] = part
        if discount > 0:
            # Observations between two actions would get a share of what follows them.
            here = discounted_future_sum_vectorized(here, discount) * mask
        added.append(here[mask != 0])
        advantages = (_field(datum, "advantages") + here).astype(np.float32)
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(advantages)
    return np.concatenate(added)


def discounted_future_sum_vectorized(x: Any, gamma: float) -> Any:
    """Returns ``y[t] = x[t] + gamma * x[t + 1] + gamma**2 * x[t + 2] + …`` for [T], computed in
    float64.

    Sums over 1, 2, 4, … terms are doubled: ``y_2n[t] = y_n[t] + gamma**n * y_n[t + n]``.

    Args:
        x: An array, or a tensor.
        gamma: From 0 to 1.

    Returns:
        An array of float64; of a tensor a tensor like it.
    """
    if hasattr(x, "detach"):
        y = discounted_future_sum_vectorized(x.detach().cpu().numpy(), gamma)
        return x.new_tensor(y)
    y = np.array(x, dtype=np.float64)
    reach, factor = 1, float(gamma)
    while reach < len(y) and factor != 0:
        y[:-reach] += factor * y[reach:]
        reach, factor = 2 * reach, factor * factor
    return y


def check_penalty(coef: float, discount: float) -> None:
    """Raises ``ConfigurationError`` for a coefficient or a discount that cannot be."""
    if not math.isfinite(coef):
        raise ConfigurationError(f"kl_penalty_coef: got {coef}, expected a finite number")
    if not 0 <= discount <= 1:
        raise ConfigurationError(
            f"kl_discount_factor: got {discount}, expected 0 (no future) to 1 (all of it)"
        )


def sampled_logprobs(data_D: Sequence[tinker.Datum]) -> _Array:
    """Returns the sampler's log-probabilities of the trained tokens of all data, in order [N]."""
    return trained_values(data_D, [_field(datum, "logprobs") for datum in data_D])


def trained_values(
    data_D: Sequence[tinker.Datum], values_D: Sequence[_Array], name: str = "logprobs"
) -> _Array:
    """Of log-probabilities [T] for each datum, those of the trained tokens, in order [N].

    Raises:
        DataValidationError: They do not fit the data, or one is not finite; ``name`` says whose
            they are.
    """
    if len(values_D) != len(data_D):
        raise DataValidationError(
            f"{name}: got {len(values_D)} entries, expected {len(data_D)}, one for each datum"
        )
    parts = [np.empty(0)]
    for index, (datum, values) in enumerate(zip(data_D, values_D, strict=True)):
        mask = _field(datum, "mask")
        if values.shape != mask.shape:
            raise DataValidationError(
                f"{name}, datum {index}: got log-probabilities of shape {values.shape}, expected "
                f"{mask.shape}, one for each target"
            )
        parts.append(values[mask != 0])
        if not np.isfinite(parts[-1]).all():
            raise DataValidationError(
                f"{name}, datum {index}: the log-probability of a trained token is "
                f"{parts[-1][~np.isfinite(parts[-1])][0]}, expected a finite number"
            )
    return np.concatenate(parts)


def _field(datum: tinker.Datum, name: str) -> _Array:
    if name not in datum.loss_fn_inputs:
        raise DataValidationError(
            f"datum: loss_fn_inputs lacks {name!r}, expected a datum of trajectory_to_data; take "
            "metrics and penalties before data_for_loss drops the mask"
        )
    return _as_array(datum.loss_fn_inputs[name])


def _as_array(values: Any) -> _Array:
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
