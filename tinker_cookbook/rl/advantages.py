"""Advantages: the reward of each trajectory relative to its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, nearest
from tinker_cookbook.rl.types import TrajectoryGroup

AdvantageNormalization: TypeAlias = Literal["center", "std", "leave_one_out"]

LARGEST_REWARD = 1e30
"""Advantages are float32 in training; differences of larger rewards could overflow there."""
_STD_EPSILON = 1e-4
# Judges and reward models compute in float32, whose rounding error is 6e-8 of a value.
_ROUNDING = 5e-7


def compute_advantages(
    trajectory_groups_P: Sequence[TrajectoryGroup],
) -> list[npt.NDArray[np.float64]]:
    """Returns :func:`normalized_advantages` with ``center``: rewards minus their group's mean."""
    return normalized_advantages(trajectory_groups_P, "center")


def normalized_advantages(
    trajectory_groups_P: Sequence[TrajectoryGroup], normalization: AdvantageNormalization
) -> list[npt.NDArray[np.float64]]:
    """Returns the advantage of each trajectory, [G] for each group, from the total rewards ``r``.

    =================  ====================================================================
    ``center``         ``r_i - mean(r)``
    ``std``            ``(r_i - mean(r)) / (std(r) + 1e-4)``, the standard deviation with
                       divisor ``G - 1`` (GRPO, arXiv 2402.03300; the constant as in TRL)
    ``leave_one_out``  ``r_i - mean of the others' r``, which is ``center`` times
                       ``G / (G - 1)`` (RLOO, arXiv 2402.14740)
    =================  ====================================================================

    A member without a trained token (all of its turns are masked, or it has none) is not compared:
    it is part of neither mean nor G, and its advantage is 0. Advantages add up to 0 over a group,
    and are exactly 0 if all rewards of the group are equal up to rounding in float32.

    Raises:
        ConfigurationError: ``normalization`` is none of these.
        DataValidationError: A reward is not finite or above 1e30; the message names group and
            member.
    """
    if normalization not in get_args(AdvantageNormalization):
        raise ConfigurationError(
            f"normalization: got {normalization!r}, expected one of "
            f"{', '.join(get_args(AdvantageNormalization))}"
            f"{nearest(str(normalization), get_args(AdvantageNormalization))}"
        )
    advantages_P = []
    for index, group in enumerate(trajectory_groups_P):
        rewards_G, trained_G = _rewards(group, index), _trained(group)
        advantages_G = np.zeros_like(rewards_G)
        compared = rewards_G[trained_G]
        # Dividing by the tiny standard deviation of equal rewards would scale rounding errors up.
        if not is_constant(compared):
            # The group's mean is the baseline: only differences within the group are learned.
            difference = compared - compared.mean()
            if normalization == "std":
                # Groups then count equally, whatever the spread of their rewards.
                difference /= compared.std(ddof=1) + _STD_EPSILON
            elif normalization == "leave_one_out":
                difference *= len(compared) / (len(compared) - 1)
            advantages_G[trained_G] = difference
        advantages_P.append(advantages_G)
    return advantages_P


def is_constant(rewards_G: Sequence[float] | npt.NDArray[np.float64]) -> bool:
    """Returns whether all rewards are equal up to rounding, so that there is nothing to learn."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.size == 0:
        return True
    # Rewards with a smaller relative difference differ only by rounding.
    return bool(np.ptp(rewards) <= _ROUNDING * np.abs(rewards).max())


def indices_of_varying_groups(trajectory_groups_P: Sequence[TrajectoryGroup]) -> list[int]:
    """Returns the indices of the groups in which rewards of trained members differ."""
    return [
        index
        for index, group in enumerate(trajectory_groups_P)
        if not is_constant(_rewards(group, index)[_trained(group)])
    ]


def remove_constant_reward_groups(
    trajectory_groups_P: Sequence[TrajectoryGroup],
) -> list[TrajectoryGroup]:
    """Returns the groups whose rewards differ, in order; the first group if there is none.

    So a batch is never empty, as in the official cookbook. ``indices_of_varying_groups`` may be.
    """
    kept = indices_of_varying_groups(trajectory_groups_P)
    return [trajectory_groups_P[i] for i in kept] or list(trajectory_groups_P[:1])


def _rewards(group: TrajectoryGroup, index: int) -> npt.NDArray[np.float64]:
    rewards_G = np.asarray(group.get_total_rewards(), dtype=np.float64)
    # One such reward would make the advantages of the whole group NaN.
    wrong = np.flatnonzero(~(np.abs(rewards_G) <= LARGEST_REWARD))
    if wrong.size:
        raise DataValidationError(
            f"group {index}, member {wrong[0]}: its total reward is {rewards_G[wrong[0]]}, "
            f"expected a finite number of at most {LARGEST_REWARD:g}; check the environment's "
            "rewards"
        )
    return rewards_G


def _trained(group: TrajectoryGroup) -> npt.NDArray[np.bool_]:
    """Returns which members [G] have a trained token; all of them if none has."""
    trained_G = np.array(
        [
            any(turn.ac.tokens and not turn.is_masked for turn in trajectory.transitions)
            for trajectory in group.trajectories_G
        ],
        dtype=bool,
    )
    # Then the advantages train nothing; loops of user code may read them all the same.
    return trained_G if trained_G.any() else ~trained_G
