"""How much better a trajectory did than the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, nearest
from tinker_cookbook.rl.types import TrajectoryGroup

__all__ = [
    "AdvantageNormalization",
    "compute_advantages",
    "indices_of_varying_groups",
    "is_constant",
    "remove_constant_reward_groups",
]

AdvantageNormalization: TypeAlias = Literal["center", "std", "leave_one_out"]

_EQUAL = 1e-9  # rewards that differ by less, relative to their size, differ by rounding alone


def compute_advantages(
    trajectory_groups_P: Sequence[TrajectoryGroup],
    normalization: AdvantageNormalization = "center",
) -> list[npt.NDArray[np.float64]]:
    """One advantage for each trajectory, [G] for each group, from the total rewards ``r``.

    =================  ====================================================================
    ``center``         ``r_i - mean(r)``
    ``std``            ``(r_i - mean(r)) / std(r)``, the standard deviation with divisor
                       ``G - 1`` as GRPO's public implementations take it (arXiv 2402.03300)
    ``leave_one_out``  ``r_i - mean of the others' r``, which is ``center`` times
                       ``G / (G - 1)`` (RLOO, arXiv 2402.14740)
    =================  ====================================================================

    They add up to 0 over a group. A group whose rewards are equal has nothing to compare: its
    advantages are exactly 0 under each of them, and so is that of a group of one.

    Raises:
        ConfigurationError: ``normalization`` is none of these.
        DataValidationError: A reward is not a finite number; names group and member.
    """
    if normalization not in get_args(AdvantageNormalization):
        raise ConfigurationError(
            f"normalization: got {normalization!r}, expected one of "
            f"{', '.join(get_args(AdvantageNormalization))}"
            f"{nearest(str(normalization), get_args(AdvantageNormalization))}"
        )
    return [
        _advantages(_rewards(group, index), normalization)
        for index, group in enumerate(trajectory_groups_P)
    ]


def is_constant(rewards_G: Sequence[float] | npt.NDArray[np.float64]) -> bool:
    """Returns whether all rewards are equal up to rounding, so that they teach nothing."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.size == 0:
        return True
    return bool(np.ptp(rewards) <= _EQUAL * np.abs(rewards).max())


def indices_of_varying_groups(trajectory_groups_P: Sequence[TrajectoryGroup]) -> list[int]:
    """Returns the places of the groups whose rewards differ.

    Whatever else is known of each group (its tags, its problem) has to be filtered by the same
    places; zipping it with the groups that are left would name the wrong ones.
    """
    return [
        index
        for index, group in enumerate(trajectory_groups_P)
        if not is_constant(_rewards(group, index))
    ]


def remove_constant_reward_groups(
    trajectory_groups_P: Sequence[TrajectoryGroup],
) -> list[TrajectoryGroup]:
    """Returns the groups whose rewards differ, in order; none if there is no such group.

    ``indices_of_varying_groups`` tells which they are.
    """
    return [trajectory_groups_P[i] for i in indices_of_varying_groups(trajectory_groups_P)]


def _advantages(
    rewards_G: npt.NDArray[np.float64], normalization: AdvantageNormalization
) -> npt.NDArray[np.float64]:
    # Without this, what rounding leaves of equal rewards would be blown up by a tiny deviation.
    if is_constant(rewards_G):
        return np.zeros_like(rewards_G)
    centred = rewards_G - rewards_G.mean()
    if normalization == "std":
        return centred / rewards_G.std(ddof=1)
    if normalization == "leave_one_out":
        return centred * (len(rewards_G) / (len(rewards_G) - 1))
    return centred


def _rewards(group: TrajectoryGroup, index: int) -> npt.NDArray[np.float64]:
    rewards_G = np.asarray(group.get_total_rewards(), dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(rewards_G))
    if wrong.size:
        raise DataValidationError(
            f"group {index}, member {wrong[0]}: its total reward is {rewards_G[wrong[0]]}, "
            "expected a finite number; check the environment's rewards"
        )
    return rewards_G
