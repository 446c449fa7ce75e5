"""Advantages within groups, and groups that have none."""

from __future__ import annotations

import numpy as np
import pytest
from trajectory_samples import episode, group, group_of_rewards

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.advantages import indices_of_varying_groups
from tinker_cookbook.rl.data_processing import compute_advantages, remove_constant_reward_groups


def test_advantages_are_centred_within_each_group():
    groups = [group_of_rewards(1, 0, 0, 1), group_of_rewards(3.0), group_of_rewards(-1, 2, 2)]
    advantages = compute_advantages(groups)
    assert [a.tolist() for a in advantages] == [[0.5, -0.5, -0.5, 0.5], [0.0], [-2, 1, 1]]


def test_rewards_of_the_group_count_too():
    (advantages,) = compute_advantages([group(*[episode()] * 2, final=[0.25, 0.75])])
    assert advantages.tolist() == [-0.25, 0.25]


def test_std_and_leave_one_out_follow_their_formulas():
    rewards = [0.0, 0.5, 2.0, -1.0]
    groups = [group_of_rewards(*rewards)]
    by_std = compute_advantages(groups, "std")[0]
    assert by_std == pytest.approx(
        (np.array(rewards) - np.mean(rewards)) / np.std(rewards, ddof=1), abs=1e-15
    )
    others = [np.mean(rewards[:i] + rewards[i + 1 :]) for i in range(4)]
    by_others = compute_advantages(groups, "leave_one_out")[0]
    assert by_others == pytest.approx(np.array(rewards) - others, abs=1e-15)


@pytest.mark.parametrize("normalization", ["center", "std", "leave_one_out"])
def test_equal_rewards_and_groups_of_one_have_advantage_zero(normalization):
    # 0.1 + 0.2 is not 0.3: rounding must not look like a difference, least of all under std.
    groups = [group_of_rewards(0.1 + 0.2, 0.3, 0.3), group_of_rewards(7.0), group_of_rewards(0, 0)]
    for advantages in compute_advantages(groups, normalization):
        assert (advantages == 0).all()


def test_small_differences_are_differences():
    assert indices_of_varying_groups([group_of_rewards(1.0, 1.0 + 1e-6)]) == [0]
    assert indices_of_varying_groups([group_of_rewards(0.0, 1e-12)]) == [0]


def test_constant_groups_are_removed_and_the_rest_are_known_by_place():
    groups = [group_of_rewards(*r) for r in [(1, 1), (1, 0), (0, 0), (0, 2), (5,)]]
    assert indices_of_varying_groups(groups) == [1, 3]
    kept = remove_constant_reward_groups(groups)
    assert len(kept) == 2
    assert kept[0] is groups[1]
    assert kept[1] is groups[3]
    constant = [groups[0], groups[2]]
    assert [group is groups[0] for group in remove_constant_reward_groups(constant)] == [True]
    assert remove_constant_reward_groups([]) == []


def test_bad_rewards_and_settings_are_named():
    groups = [group_of_rewards(1, 0), group_of_rewards(1, float("nan"))]
    for call in (compute_advantages, remove_constant_reward_groups):
        with pytest.raises(DataValidationError, match=r"group 1, member 1: .* is nan, expected"):
            call(groups)
    with pytest.raises(ConfigurationError, match=r"got 'centre', .* did you mean 'center'"):
        compute_advantages(groups, "centre")  # type: ignore[arg-type]
