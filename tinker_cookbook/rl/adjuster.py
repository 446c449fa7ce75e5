"""Where advantages come from beside the rewards: a policy or a teacher that scores each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tinker_cookbook.rl.data_processing import DatumPlace
from tinker_cookbook.rl.types import Trajectory

if TYPE_CHECKING:
    import tinker

    from tinker_cookbook.rl.sources_play import PlayedGroup

_NO_PULL = 1e-4
"""A KL below this, in nats, is rounding. Adam would turn even that into a step of full size."""


@dataclass(frozen=True)
class PlayedData:
    """Data that are about to be trained, and where they come from.

    ``places_D[i].group`` is the place in ``groups`` of what ``data_D[i]`` was made of; the data of
    a trajectory stand side by side.
    """

    groups: Sequence[PlayedGroup]
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
    async def adjust(self, played: PlayedData) -> Adjustment:
        """Changes ``played.data_D`` in place. Called with a whole batch, or in a streaming run with
        its parts as they are finished; metrics of the parts are joined."""


def advantages_of(data_D: Sequence[tinker.Datum]) -> list[np.ndarray]:
    """The advantages [T] of each datum."""
    return [datum.loss_fn_inputs["advantages"].to_numpy() for datum in data_D]


def is_pull(values: np.ndarray, coef: float) -> bool:
    """Whether any of the advantages that a KL times ``coef`` gave is more than rounding."""
    return float(np.abs(values).max(initial=0.0)) > _NO_PULL * coef
