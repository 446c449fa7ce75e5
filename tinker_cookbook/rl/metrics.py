"""KL divergences between policies on sampled tokens, and the KL penalty.

All estimates are means over the trained action tokens of a batch (``mask`` of the datums), in nats
per token, from log-probabilities at temperature 1. With ``d`` the log of the ratio of the sampling
policy to the other one at each token (Schulman 2020, http://joschu.net/blog/kl-approx.html):

- v1 is ``mean(d)``: unbiased for KL(sampler || other), of high variance, may be below 0
- v2 is ``mean(d**2) / 2``: biased, of low variance, never below 0

``docs/rl-metrics.md`` has the usual and the worrying values of the metrics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.data_processing import REFERENCE_LOGPROBS, SAMPLER_LOGPROBS
from tinker_cookbook.rl.loop.adjuster import (
    Adjustment,
    AdvantageAdjuster,
    Mean,
    RolloutData,
    advantages_of,
    kl_is_significant,
)
from tinker_cookbook.utils.imports import official_names, tinker
from tinker_cookbook.utils.model_inputs import score_datums

__getattr__ = official_names(__name__)

_Array = npt.NDArray[np.float64]

# The losses of the local engine bound the ratio of learner to sampler here.
_EXTREME_LOG_RATIO = 20.0


def compute_kl_sample_train(
    data_D: Sequence[tinker.Datum], training_logprobs_D: Sequence[Any]
) -> dict[str, float]:
    """Returns KL metrics of the sampler against the learner, from the update's log-probabilities.

    ``optim/kl_sample_train_v1`` and ``_v2`` are KL(sampler || learner), ``optim/entropy`` is the
    mean of ``-logprob`` of the sampled tokens, in nats. ``optim/num_extreme_ratios``, only if it
    is not 0, is the number of tokens whose ratio is too large to be trained on.
    ``training_logprobs_D`` has the learner's log-probabilities [T] of each datum's targets: arrays,
    tensors or ``TensorData``. The metrics are empty if no token is trained.
    """
    learner_D = [_as_array(logprobs) for logprobs in training_logprobs_D]
    sampled = sampled_logprobs(data_D)
    learner = trained_values(data_D, learner_D, "training_logprobs_D")
    # Rounding on-policy; off-policy it grows with the staleness of the data.
    metrics = _kl_metrics("optim/kl_sample_train", sampled - learner)
    if extreme := int(np.count_nonzero(learner - sampled > _EXTREME_LOG_RATIO)):
        metrics["optim/num_extreme_ratios"] = extreme
    return {**metrics, "optim/entropy": float(-sampled.mean())} if metrics else {}


def kl_sample_train_by_depth(
    data_D: Sequence[tinker.Datum], training_logprobs_D: Sequence[Any], edges: Sequence[int]
) -> dict[str, float]:
    """Returns the KL metrics of :func:`compute_kl_sample_train` by the length of the context.

    The depth of a token is the number of tokens before it. ``edges`` are the ends of the ranges:
    ``(1024, 4096)`` gives ``optim/kl_sample_train_v1/0_1024``, ``…/1024_4096`` and ``…/4096_up``,
    the same of ``_v2``, and ``optim/kl_tokens/RANGE``, the number of trained tokens. A range
    without tokens has no metrics. A KL that grows with the depth shows an error in how one of the
    two sides computes long contexts (positions, caches, rounding of attention).
    """
    learner_D = [_as_array(logprobs) for logprobs in training_logprobs_D]
    sampled = sampled_logprobs(data_D)
    difference = sampled - trained_values(data_D, learner_D, "training_logprobs_D")
    # Target i is token i + 1 of the sequence, so i + 1 tokens are before it.
    depths_D = [np.arange(1, len(learner) + 1, dtype=np.float64) for learner in learner_D]
    depths = trained_values(data_D, depths_D, "depths")
    found: dict[str, float] = {}
    for low, high in itertools.pairwise((0, *edges, math.inf)):
        here = difference[(depths >= low) & (depths < high)]
        name = f"{low}_{high}" if high < math.inf else f"{low}_up"
        metrics = _kl_metrics("optim/kl_sample_train", here)
        found |= {f"{key}/{name}": value for key, value in metrics.items()}
        if metrics:
            found[f"optim/kl_tokens/{name}"] = float(here.size)
    return found


def post_kl_metrics(data_D: Sequence[tinker.Datum], after_D: Sequence[_Array]) -> dict[str, float]:
    """Returns KL(before || after) an update, as ``kl_pre_post_v1`` and ``_v2``.

    ``after_D`` has the log-probabilities [T] of each datum's targets after the update.
    """
    after = trained_values(data_D, after_D, "post_sampling_client")
    return _kl_metrics("kl_pre_post", sampled_logprobs(data_D) - after)


def _kl_metrics(prefix: str, difference: _Array) -> dict[str, float]:
    if not difference.size:
        return {}
    return {
        # v1 is the unbiased estimate; a v2 far above it shows that few tokens changed a lot.
        f"{prefix}_v1": float(difference.mean()),
        f"{prefix}_v2": float(np.square(difference).mean() / 2),
    }


class KLPenalty(AdvantageAdjuster):
    """KL penalty of :func:`add_penalty`; each call needs all groups of an iteration."""

    def __init__(self, reference: SamplingClient, coef: float, discount: float = 0.0) -> None:
        self._reference, self._coef, self._discount = reference, coef, discount

    async def adjust(self, rollouts: RolloutData) -> Adjustment:
        """Lowers the advantages of tokens that the reference finds less probable."""
        # Before the penalty, which changes all advantages, some of them only by rounding.
        rewarded = any(values.any() for values in advantages_of(rollouts.data_D))
        reference_D = await score_datums(self._reference, rollouts.data_D)
        mean, penalty = add_penalty(rollouts.data_D, reference_D, self._coef, self._discount)
        for datum, values in zip(rollouts.data_D, reference_D, strict=True):
            kept = tinker.TensorData.from_numpy(values.astype(np.float32))
            datum.loss_fn_inputs[REFERENCE_LOGPROBS] = kept
        means = {"kl_policy_base": mean} if mean.count else {}
        return Adjustment(rewarded or kl_is_significant(penalty, self._coef), means)


def add_penalty(
    data_D: Sequence[tinker.Datum], reference_D: Sequence[_Array], coef: float, discount: float
) -> tuple[Mean, _Array]:
    """Adds a KL penalty towards a reference policy to the advantages; changes ``data_D``.

    With ``d = logprob of the sampler - logprob of the reference`` and its mean over the batch::

        advantages += coef * mask * (mean(d) - d)

    The mean is a baseline: the penalty moves weight between tokens and adds up to 0. ``discount``
    includes later tokens, see :func:`add_to_advantages`. Returns KL(sampler || reference), v1,
    which is logged as ``kl_policy_base``, and the values added to the advantages of the trained
    tokens.
    """
    difference = sampled_logprobs(data_D) - trained_values(
        data_D, reference_D, "base_sampling_client"
    )
    if not difference.size:
        return Mean(), difference
    mean = Mean(float(difference.sum()), difference.size)
    # Without a baseline all tokens of a policy far from its reference would be pushed down.
    centred = coef * (float(difference.mean()) - difference)
    return mean, add_to_advantages(data_D, centred, discount)


def add_to_advantages(
    data_D: Sequence[tinker.Datum], values: _Array, discount: float = 0.0
) -> _Array:
    """Adds values [N] to the advantages of the N trained tokens; changes ``data_D``.

    With a ``discount`` above 0 a token's value becomes the sum over the values from its position to
    the end of its datum, each later position multiplied by one more factor. Returns the
    added values [N].
    """
    masks_D = [_field(datum, "mask") for datum in data_D]
    # Split the values of all trained tokens by datum.
    ends = np.cumsum([np.count_nonzero(mask) for mask in masks_D])
    added = [np.empty(0)]
    for datum, mask, part in zip(data_D, masks_D, np.split(values, ends[:-1]), strict=True):
        here = np.zeros(len(mask))
        # Observations and masked turns get no value.
        here[mask != 0] = part
        if discount > 0:
            # The mask, because observations between two actions would get a share of later values.
            here = discounted_future_sum_vectorized(here, discount) * mask
        added.append(here[mask != 0])
        advantages = (_field(datum, "advantages") + here).astype(np.float32)
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(advantages)
    return np.concatenate(added)


def discounted_future_sum_vectorized(x: Any, gamma: float) -> Any:
    """Returns ``y[t] = x[t] + gamma * x[t + 1] + gamma**2 * x[t + 2] + …`` for ``x`` [T].

    ``gamma`` is from 0 to 1. The result is a float64 array, or a tensor like ``x``.
    """
    # A tensor keeps its dtype and device.
    if hasattr(x, "detach"):
        y = discounted_future_sum_vectorized(x.detach().cpu().numpy(), gamma)
        return x.new_tensor(y)
    y = np.array(x, dtype=np.float64)
    # Double the number of terms in each sum: y_2n[t] = y_n[t] + gamma**n * y_n[t + n].
    reach, factor = 1, float(gamma)
    while reach < len(y) and factor != 0:
        y[:-reach] += factor * y[reach:]
        reach, factor = 2 * reach, factor * factor
    return y


def sampled_logprobs(data_D: Sequence[tinker.Datum]) -> _Array:
    """Returns the sampler's log-probabilities of the trained tokens of all data, in order [N]."""
    names = [
        SAMPLER_LOGPROBS if SAMPLER_LOGPROBS in datum.loss_fn_inputs else "logprobs"
        for datum in data_D
    ]
    return trained_values(
        data_D, [_field(datum, name) for datum, name in zip(data_D, names, strict=True)]
    )


def trained_values(
    data_D: Sequence[tinker.Datum], values_D: Sequence[_Array], name: str = "logprobs"
) -> _Array:
    """Returns the values at the trained tokens of all data, in order [N], from [T] for each datum.

    Raises:
        DataValidationError: Shapes do not fit the data, or a value is not finite.
    """
    if len(values_D) != len(data_D):
        raise DataValidationError(
            f"{name}: got {len(values_D)} entries, expected {len(data_D)}, one for each datum"
        )
    parts = [np.empty(0)]
    for index, (datum, values) in enumerate(zip(data_D, values_D, strict=True)):
        mask = _field(datum, "mask")
        # A shape off by one would compare each token with its neighbour.
        if values.shape != mask.shape:
            raise DataValidationError(
                f"{name}, datum {index}: got log-probabilities of shape {values.shape}, expected "
                f"{mask.shape}, one for each target"
            )
        # Only trained tokens count: elsewhere the sampler's log-probabilities are 0.
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
