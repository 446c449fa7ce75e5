"""Adjustment of token advantages by a reference policy or a teacher, and losses on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.backends import Future, TrainingClient
from tinker_cookbook.rl.data_processing import DatumOrigin, check_provenance, data_for_loss
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.utils.imports import tinker

if TYPE_CHECKING:
    from tinker_cookbook.rl.config import Config
    from tinker_cookbook.rl.loop.sources import RolloutGroup


@dataclass(frozen=True)
class RolloutData:
    """Training data with their groups.

    ``origins_D[i].group`` is the index in ``groups`` of the group of ``data_D[i]``; the data of one
    trajectory are adjacent.
    """

    groups: Sequence[RolloutGroup]
    data_D: list[tinker.Datum]
    origins_D: Sequence[DatumOrigin]

    def trajectory(self, origin: DatumOrigin) -> Trajectory:
        """Returns the trajectory of a datum."""
        return self.groups[origin.group].group.trajectories_G[origin.member]


@dataclass(frozen=True)
class Mean:
    """Mean that can be added to the mean of other tokens or episodes."""

    total: float = 0.0
    count: int = 0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """Mean of at least one value."""
        return self.total / self.count


@dataclass(frozen=True)
class Adjustment:
    """Result of an adjustment: its metrics, and whether any advantage is not 0."""

    has_signal: bool
    """Data without a signal never form a step by themselves."""
    means: dict[str, Mean] = field(default_factory=dict)


class AdvantageAdjuster(ABC):
    """Adjustment of advantages before training.

    It keeps no state between calls, so that a resumed run equals an uninterrupted one.
    """

    @abstractmethod
    async def adjust(self, rollouts: RolloutData) -> Adjustment:
        """Changes ``rollouts.data_D``: a whole batch, or one of its parts in a streaming run."""

    def submit(
        self, client: TrainingClient, data_D: Sequence[tinker.Datum], config: Config
    ) -> Future[tinker.ForwardBackwardOutput]:
        """Submits the pass over adjusted data; by default with the loss of the run."""
        return submit_loss(client, data_D, config.training_loss_fn(), config.loss_fn_config)

    def trained_logprobs(self, output: tinker.ForwardBackwardOutput) -> list[Any]:
        """Returns the learner's log-probabilities [T] of each datum's tokens."""
        return logprobs_of(output)


def logprobs_of(output: tinker.ForwardBackwardOutput) -> list[Any]:
    """Returns the log-probabilities [T] of each datum's targets."""
    return [record["logprobs"] for record in output.loss_fn_outputs]


def submit_loss(
    client: TrainingClient,
    data_D: Sequence[tinker.Datum],
    loss_fn: str,
    loss_fn_config: dict[str, Any] | None,
) -> Future[tinker.ForwardBackwardOutput]:
    """Submits a pass over data with their ``mask``.

    Raises:
        DataValidationError: The loss needs provenance that a datum lacks.
    """
    # Before ``data_for_loss``, so that the error names the datum and what to change.
    check_provenance(data_D, loss_fn)
    data = data_for_loss(data_D, loss_fn)
    return client.forward_backward(data, loss_fn, loss_fn_config)  # type: ignore[arg-type]


def advantages_of(data_D: Sequence[tinker.Datum]) -> list[np.ndarray]:
    """Returns the advantages [T] of each datum."""
    return [datum.loss_fn_inputs["advantages"].to_numpy() for datum in data_D]


def kl_is_significant(values: np.ndarray, coef: float) -> bool:
    """Returns whether an advantage from a KL times ``coef`` is more than rounding."""
    # A KL below 1e-4 nats is rounding, which Adam would scale up to a full step.
    return float(np.abs(values).max(initial=0.0)) > 1e-4 * coef
