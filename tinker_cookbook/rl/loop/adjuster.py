"""Where advantages come from beside the rewards: a policy or a teacher that scores each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_cookbook.rl.data_processing import DatumPlace, check_provenance, data_for_loss
from tinker_cookbook.rl.types import Trajectory

if TYPE_CHECKING:
    import tinker
    from tinker import types

    from tinker_cookbook.backends import Future, TrainingClient
    from tinker_cookbook.rl.config import PolicyTrainingConfig
    from tinker_cookbook.rl.loop.rollout_worker import RolloutGroup

_MIN_KL = 1e-4
"""A KL below this, in nats, is rounding. Adam would turn even that into a step of full size."""


@dataclass(frozen=True)
class RolloutData:
    """Data that are about to be trained, and where they come from.

    ``places_D[i].group`` is the place in ``groups`` of what ``data_D[i]`` was made of; the data of
    a trajectory stand side by side.
    """

    groups: Sequence[RolloutGroup]
    data_D: list[tinker.Datum]
    places_D: Sequence[DatumPlace]

    def trajectory(self, place: DatumPlace) -> Trajectory:
        """What was played at a place."""
        return self.groups[place.group].group.trajectories_G[place.member]


@dataclass(frozen=True)
class Mean:
    """A mean that can be joined with that of other tokens or episodes."""

    total: float = 0.0
    count: int = 0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """Of one value at least."""
        return self.total / self.count


@dataclass(frozen=True)
class Adjustment:
    """What became of the data.

    Attributes:
        has_signal: Whether the advantages teach anything now. Alone, data without signal are not
            trained on.
        means: Metrics by name.
    """

    has_signal: bool
    means: dict[str, Mean] = field(default_factory=dict)


class AdvantageAdjuster(ABC):
    """Changes the advantages of played data, which hold those of the rewards, before they train.

    One instance serves a whole run. It keeps nothing from one call to the next, or a resumed run
    would not equal one that was never stopped.
    """

    @abstractmethod
    async def adjust(self, played: RolloutData) -> Adjustment:
        """Changes ``played.data_D`` in place. Called with a whole batch, or in a streaming run with
        its parts as they are finished; metrics of the parts are joined."""

    def submit(
        self, client: TrainingClient, data_D: Sequence[tinker.Datum], config: PolicyTrainingConfig
    ) -> Future[types.ForwardBackwardOutput]:
        """Starts the pass over adjusted data; by default with the run's own loss."""
        return submit_policy_loss(client, data_D, config)

    def trained_logprobs(self, output: types.ForwardBackwardOutput) -> list[Any]:
        """The learner's log-probabilities [T] of each datum's tokens, from the pass's output."""
        return logprobs_of(output)


def logprobs_of(output: types.ForwardBackwardOutput) -> list[Any]:
    """Log-probabilities of each datum's targets."""
    return [record["logprobs"] for record in output.loss_fn_outputs]


def submit_policy_loss(
    client: TrainingClient, data_D: Sequence[tinker.Datum], config: PolicyTrainingConfig
) -> Future[types.ForwardBackwardOutput]:
    """Starts a pass with the loss that the config names.

    Raises DataValidationError where that loss needs provenance that a datum lacks.
    """
    check_provenance(data_D, config.loss_name)
    return client.forward_backward(
        data_for_loss(data_D, config.loss_name),
        config.loss_name,  # type: ignore[arg-type]
        config.loss_fn_config,
    )


def advantages_of(data_D: Sequence[tinker.Datum]) -> list[np.ndarray]:
    """The advantages [T] of each datum."""
    return [datum.loss_fn_inputs["advantages"].to_numpy() for datum in data_D]


def kl_is_significant(values: np.ndarray, coef: float) -> bool:
    """Whether any of the advantages that a KL times ``coef`` gave is more than rounding."""
    return float(np.abs(values).max(initial=0.0)) > _MIN_KL * coef
