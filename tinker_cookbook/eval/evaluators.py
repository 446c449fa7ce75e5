"""Interface of evaluators that training loops run on the current weights.

Loops take builders (``evaluator_builders``), not evaluators, so that a config is plain data and
nothing is loaded before the run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from tinker_cookbook.backends import SamplingClient, TrainingClient
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    from tinker_cookbook.record.write import RecordWriter


class TrainingClientEvaluator:
    """Evaluates through the training client: losses on held-out data."""

    record: RecordWriter | None = None
    """The run's record, which a loop gives to the evaluators of its own test set."""

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Returns metrics of the weights after all operations submitted so far."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


class SamplingClientEvaluator:
    """Evaluates a fixed version of the weights by sampling or scoring."""

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Returns metrics of the client's weights."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


Evaluator: TypeAlias = TrainingClientEvaluator | SamplingClientEvaluator
EvaluatorBuilder: TypeAlias = Callable[[], Evaluator]
SamplingClientEvaluatorBuilder: TypeAlias = Callable[[], SamplingClientEvaluator]


async def forward_logprobs(
    client: TrainingClient, data: Sequence[tinker.Datum], batch_size: int = 32
) -> list[tinker.TensorData]:
    """Returns the log-probabilities of each datum's targets, ``batch_size`` datums per request."""
    # Submit all requests before awaiting the first, so that the backend is never idle.
    futures = [
        client.forward(list(data[start : start + batch_size]), "cross_entropy")
        for start in range(0, len(data), batch_size)
    ]
    return [record["logprobs"] for future in futures for record in (await future).loss_fn_outputs]
