"""Advantages within groups, and groups that have none."""

from __future__ import annotations

import numpy as np
import pytest
from trajectory_samples import episode, group, group_of_rewards, turn

from tinker_cookbook.rl.advantages import indices_of_varying_groups, normalized_advantages
from tinker_cookbook.rl.data_processing import (
    compute_advantages,
    remove_constant_reward_groups,
)


def test_advantages_are_centred_within_each_group():
    groups = [group_of_rewards(1, 0, 0, 1), group_of_rewards(3.0), group_of_rewards(-1, 2, 2)]
    advantages = compute_advantages(groups)
    assert [a.tolist() for a in advantages] == [[0.5, -0.5, -0.5, 0.5], [0.0], [-2, 1, 1]]


def test_std_and_leave_one_out_follow_their_formulas():
    rewards = [0.0, 0.5, 2.0, -1.0]
    groups = [group_of_rewards(*rewards)]
    by_std = normalized_advantages(groups, "std")[0]
    assert by_std == pytest.approx(
        (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4), abs=1e-15
    )
    others = [np.mean(rewards[:i] + rewards[i + 1 :]) for i in range(4)]
    by_others = normalized_advantages(groups, "leave_one_out")[0]
    assert by_others == pytest.approx(np.array(rewards) - others, abs=1e-15)


@pytest.mark.parametrize("normalization", ["center", "std", "leave_one_out"])
def test_equal_rewards_and_groups_of_one_have_advantage_zero(normalization):
    # 0.1 + 0.2 is not 0.3: rounding must not look like a difference, least of all under std.
    for rewards in (
        (0.1 + 0.2, 0.3, 0.3),
        (7.0,),
        (0, 0),
        (float(np.float32(0.7)), 0.7, 0.7, 0.7),  # judges that mix float32 and float64
        (float(np.float32(1e6 / 3)), 1e6 / 3),
        (float(np.float32(0.1) * np.float32(3)), 0.3),
        (-0.7, -float(np.float32(0.7))),
    ):
        (advantages,) = normalized_advantages([group_of_rewards(*rewards)], normalization)
        assert (advantages == 0).all(), rewards


@pytest.mark.parametrize("normalization", ["center", "std", "leave_one_out"])
def test_members_without_a_trained_token_have_no_part_in_the_baseline(normalization):
    masked = {"masked": True}
    by_metric = {"metrics": {"parse_error_masked": 1.0}}
    trained = {}
    for members, kept in (
        ([(1, trained), (1, masked), (0, trained), (0, trained)], [0, 2, 3]),
        ([(1, trained), (1, by_metric), (0, trained)], [0, 2]),
        ([(1, trained), (1, trained), (1, trained), (0, masked)], [0, 1, 2]),
        ([(1, trained), (0, None), (0.5, trained)], [0, 2]),  # None: an episode without a turn
        ([(1, masked), (0, trained)], [1]),
        ([(1, masked), (0, masked)], [0, 1]),  # nothing is trained
    ):
        episodes = [
            episode() if kind is None else episode(turn([1], [2], reward, **kind))
            for reward, kind in members
        ]
        (found,) = normalized_advantages([group(*episodes)], normalization)
        alone = group_of_rewards(*(members[i][0] for i in kept))
        expected = np.zeros(len(members))
        expected[kept] = normalized_advantages([alone], normalization)[0]
        assert found.tolist() == expected.tolist(), members
        varies = len({members[i][0] for i in kept}) > 1
        assert indices_of_varying_groups([group(*episodes)]) == [0] * varies
    partly = group(
        episode(turn([1], [2], masked=True), turn([1, 2, 3], [4], 1.0)), episode(turn([1], [2]))
    )
    assert compute_advantages([partly])[0].tolist() == [0.5, -0.5]


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
