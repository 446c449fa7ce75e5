"""KL metrics that also count the scored tokens, for loops of user code (``rl.metrics``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinker_cookbook.backends import SamplingClient
from tinker_cookbook.rl.metrics import add_penalty, post_kl_metrics
from tinker_cookbook.utils.cost_estimation import TokenUsage
from tinker_cookbook.utils.imports import tinker
from tinker_cookbook.utils.model_inputs import whole_sequence


async def compute_post_kl(
    data_D: Sequence[tinker.Datum], post_sampling_client: SamplingClient
) -> tuple[dict[str, float], TokenUsage]:
    """Returns ``post_kl_metrics`` from a client of the new weights, and the scored tokens."""
    after_D, usage = await _score(post_sampling_client, data_D)
    return post_kl_metrics(data_D, after_D), usage


async def incorporate_kl_penalty(
    data_D: Sequence[tinker.Datum],
    base_sampling_client: SamplingClient,
    kl_penalty_coef: float,
    kl_discount_factor: float = 0.0,
) -> tuple[dict[str, float], TokenUsage]:
    """Adds the KL penalty of ``add_penalty`` to the advantages; changes ``data_D``.

    Returns the metric ``kl_policy_base`` (nothing if no token is trained) and the scored tokens.
    """
    base_D, usage = await _score(base_sampling_client, data_D)
    mean, _ = add_penalty(data_D, base_D, kl_penalty_coef, kl_discount_factor)
    return {"kl_policy_base": mean.mean} if mean.count else {}, usage


async def score_sequences(
    sampling_client: SamplingClient, sequence_inputs: Sequence[tinker.ModelInput]
) -> tuple[list[list[float | None]], TokenUsage]:
    """Returns the log-probabilities [T] of whole sequences, in nats, and the processed tokens.

    The first score of a sequence is ``None``, because its first token is not predicted.
    """
    # A sampling request, because its response reports how many prompt tokens were cached. All are
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


async def _score(
    client: SamplingClient, data_D: Sequence[tinker.Datum]
) -> tuple[list[np.ndarray], TokenUsage]:
    """Returns log-probabilities [T] of each datum's targets; NaN if the client returns none."""
    scores_D, usage = await score_sequences(client, [whole_sequence(datum) for datum in data_D])
    # Score i + 1 belongs to target i, because targets are shifted by one token.
    return [np.array(scores[1:], dtype=np.float64) for scores in scores_D], usage


def compute_sampling_client_metrics(
    wrapped_trajectory_groups: Sequence[Any],
) -> dict[str, float]:
    """Returns metrics of ``WrappedTrajectoryGroup``s, each with ``_max``, ``_min`` and ``_mean``.

    ``sampling_client/step`` is the number of updates in the weights that sampled a group,
    ``time/sampling_time`` the seconds of its rollout.
    """
    if not (groups := wrapped_trajectory_groups):
        return {}
    seconds = [group.metrics["time/trajectory_group_worker_loop/total"] for group in groups]
    metrics: dict[str, float] = {}
    for name, values in (
        ("sampling_client/step", [group.sampling_client_step for group in groups]),
        ("time/sampling_time", seconds),
    ):
        metrics |= {f"{name}_max": max(values), f"{name}_min": min(values)}
        metrics[f"{name}_mean"] = sum(values) / len(values)
    return metrics
