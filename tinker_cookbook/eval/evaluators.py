"""What a training loop calls to evaluate its present weights.

Loops take builders (``evaluator_builders``), not evaluators, so that a config stays plain data and
nothing is loaded before the run begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tinker_cookbook.backends import SamplingClient, TrainingClient


class TrainingClientEvaluator:
    """Evaluates through the training client: losses on held-out data."""

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        """Metrics of the weights as they are after the operations submitted so far."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


class SamplingClientEvaluator:
    """Evaluates by sampling from, or scoring with, one fixed version of the weights."""

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """Metrics of the weights that the client holds."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


Evaluator: TypeAlias = TrainingClientEvaluator | SamplingClientEvaluator
EvaluatorBuilder: TypeAlias = Callable[[], Evaluator]
SamplingClientEvaluatorBuilder: TypeAlias = Callable[[], SamplingClientEvaluator]
