"""Distances between policies on sampled tokens, and metrics of who sampled a batch.

The functions that score sequences also give the tokens that this took, for
``utils.cost_estimation``; what they compute is described in ``rl.kl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinker_cookbook.rl import kl
from tinker_cookbook.rl.kl import compute_kl_sample_train, discounted_future_sum_vectorized
from tinker_cookbook.utils.cost_estimation import TokenUsage

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.backends import SamplingClient

__all__ = [
    "compute_kl_sample_train",
    "compute_post_kl",
    "compute_sampling_client_metrics",
    "discounted_future_sum_vectorized",
    "incorporate_kl_penalty",
]


async def compute_post_kl(
    data_D: Sequence[tinker.Datum], post_sampling_client: SamplingClient
) -> tuple[dict[str, float], TokenUsage]:
    """The metrics of ``kl.compute_post_kl``, and the tokens that were read for them."""
    return await kl.compute_post_kl(data_D, post_sampling_client), _usage(data_D)


async def incorporate_kl_penalty(
    data_D: Sequence[tinker.Datum],
    base_sampling_client: SamplingClient,
    kl_penalty_coef: float,
    kl_discount_factor: float = 0.0,
) -> tuple[dict[str, float], TokenUsage]:
    """As ``kl.incorporate_kl_penalty``, which changes ``data_D``; and the tokens that were read."""
    metrics = await kl.incorporate_kl_penalty(
        data_D, base_sampling_client, kl_penalty_coef, kl_discount_factor
    )
    return metrics, _usage(data_D)


def _usage(data_D: Sequence[tinker.Datum]) -> TokenUsage:
    # Each sequence is its input and the last target.
    return TokenUsage(prefill_uncached=sum(datum.model_input.length + 1 for datum in data_D))


def compute_sampling_client_metrics(groups: Sequence[Any]) -> dict[str, float]:
    """Which updates were in the weights that sampled the groups, and how long sampling took.

    Args:
        groups: With ``sampling_client_step``, and in ``metrics`` the seconds of their rollout as
            ``time/trajectory_group_worker_loop/total``.

    Returns:
        ``sampling_client/step_max``, ``_min`` and ``_mean``, ``time/sampling_time_max``, ``_min``
        and ``_mean``; nothing for no group.
    """
    if not groups:
        return {}
    seconds = [group.metrics["time/trajectory_group_worker_loop/total"] for group in groups]
    values = {
        "sampling_client/step": [group.sampling_client_step for group in groups],
        "time/sampling_time": seconds,
    }
    ways = {"max": max, "min": min, "mean": lambda numbers: sum(numbers) / len(numbers)}
    return {f"{name}_{way}": how(v) for name, v in values.items() for way, how in ways.items()}
