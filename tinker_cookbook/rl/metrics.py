"""Distances between policies on sampled tokens, and metrics of who sampled a batch.

The functions that score sequences also give the tokens that this took, for
``utils.cost_estimation``; what they compute is described in ``rl.kl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_cookbook.rl import kl
from tinker_cookbook.rl.kl import compute_kl_sample_train, discounted_future_sum_vectorized
from tinker_cookbook.utils.cost_estimation import TokenUsage
from tinker_cookbook.utils.imports import lazy_module
from tinker_cookbook.utils.model_inputs import whole_sequence

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient
else:
    tinker = lazy_module("tinker")

__all__ = [
    "compute_kl_sample_train",
    "compute_post_kl",
    "compute_sampling_client_metrics",
    "discounted_future_sum_vectorized",
    "incorporate_kl_penalty",
    "score_sequences",
]


async def score_sequences(
    sampling_client: SamplingClient, sequence_inputs: Sequence[tinker.ModelInput]
) -> tuple[list[list[float | None]], TokenUsage]:
    """Log-probabilities of whole sequences, in nats, and the tokens that this took.

    Args:
        sampling_client: Scores the sequences.
        sequence_inputs: Sequences of T tokens each.

    Returns:
        One list [T] a sequence, whose first entry is ``None``: nothing predicts the first token.
        The usage counts prompt tokens by whether the backend reports them as cached, and the one
        token that each request samples.
    """
    # A sampling request, because its response says how many prompt tokens were cached. All are
    # submitted before the first is awaited, so that the backend can batch them.
    params = tinker.SamplingParams(max_tokens=1)
    futures = [
        sampling_client.sample(sequence, 1, params, include_prompt_logprobs=True)
        for sequence in sequence_inputs
    ]
    responses = [await future for future in futures]
    cached = sum(response.prompt_cache_hit_tokens or 0 for response in responses)
    usage = TokenUsage(
        sampled=sum(len(one.tokens) for response in responses for one in response.sequences),
        prefill_cached=cached,
        prefill_uncached=sum(sequence.length for sequence in sequence_inputs) - cached,
    )
    return [list(response.prompt_logprobs or []) for response in responses], usage


async def compute_post_kl(
    data_D: Sequence[tinker.Datum], post_sampling_client: SamplingClient
) -> tuple[dict[str, float], TokenUsage]:
    """Returns the metrics of ``kl.compute_post_kl``, and the tokens that this took."""
    after_D, usage = await _score(post_sampling_client, data_D)
    return kl.post_kl_metrics(data_D, after_D), usage


async def incorporate_kl_penalty(
    data_D: Sequence[tinker.Datum],
    base_sampling_client: SamplingClient,
    kl_penalty_coef: float,
    kl_discount_factor: float = 0.0,
) -> tuple[dict[str, float], TokenUsage]:
    """Changes ``data_D`` as ``kl.incorporate_kl_penalty`` does.

    Returns its metrics, and the tokens that this took.
    """
    kl.check_penalty(kl_penalty_coef, kl_discount_factor)
    base_D, usage = await _score(base_sampling_client, data_D)
    mean, _ = kl.add_penalty(data_D, base_D, kl_penalty_coef, kl_discount_factor)
    return {"kl_policy_base": mean.mean} if mean.count else {}, usage


async def _score(
    client: SamplingClient, data_D: Sequence[tinker.Datum]
) -> tuple[list[npt.NDArray[np.float64]], TokenUsage]:
    """Log-probabilities [T] of each datum's targets; NaN where the client gives none."""
    scores_D, usage = await score_sequences(client, [whole_sequence(datum) for datum in data_D])
    return [np.array(scores[1:], dtype=np.float64) for scores in scores_D], usage


def compute_sampling_client_metrics(
    wrapped_trajectory_groups: Sequence[Any],
) -> dict[str, float]:
    """Returns which updates were in the weights that sampled the groups, and how long sampling
    took.

    Args:
        wrapped_trajectory_groups: With ``sampling_client_step``, and in ``metrics`` the seconds of
            their rollout as ``time/trajectory_group_worker_loop/total``.

    Returns:
        ``sampling_client/step_max``, ``_min`` and ``_mean``, ``time/sampling_time_max``, ``_min``
        and ``_mean``; nothing for no group.
    """
    groups = wrapped_trajectory_groups
    if not groups:
        return {}
    seconds = [group.metrics["time/trajectory_group_worker_loop/total"] for group in groups]
    values = {
        "sampling_client/step": [group.sampling_client_step for group in groups],
        "time/sampling_time": seconds,
    }
    ways = {"max": max, "min": min, "mean": lambda numbers: sum(numbers) / len(numbers)}
    return {f"{name}_{way}": how(v) for name, v in values.items() for way, how in ways.items()}
