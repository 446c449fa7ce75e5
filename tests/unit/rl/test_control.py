"""Paying by the toss of a coin."""

from __future__ import annotations

import asyncio

import byte_tokenizer
from scripted_policy import COMMON, Script

from recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl.envs.random_reward import RandomRewardDatasetBuilder
from tinker_cookbook.rl.rollouts.group import do_group_rollout

GROUPS = 6


def play(seed: int) -> tuple[list[list[float]], list[float]]:
    """Rewards of each group, and what the answers were worth: half of them are right."""

    async def run():
        settings = {**COMMON, "group_size": 8, "batch_size": GROUPS}
        inner = ArithmeticDatasetBuilder(**settings, num_test=1)
        train, test = await RandomRewardDatasetBuilder(inner=inner, seed=seed)()
        rewards, worth = [], []
        for group in train.get_batch(0):
            envs = await group.make_envs()
            answer = envs[0].get_reference_answer()
            lines = [answer, "banana"] * 4
            played = await do_group_rollout(group, Script(*lines))
            rewards.append(played.get_total_rewards())
            worth += [t.transitions[0].metrics["true_reward"] for t in played.trajectories_G]
        (held_out,) = test.get_batch(0)
        tested = await do_group_rollout(held_out, Script(*["banana"] * 8))
        assert set(tested.get_total_rewards()) == {-0.1}  # rewarded as ever
        return rewards, worth

    with byte_tokenizer.registered():
        return asyncio.run(run())


def test_rewards_are_chance_and_the_score_is_still_seen():
    rewards, worth = play(seed=0)
    flat = [reward for group in rewards for reward in group]
    assert set(flat) == {0.0, 1.0}
    assert 0.2 < sum(flat) / len(flat) < 0.8
    assert sorted(worth) == [-0.1] * 4 * GROUPS + [1.0] * 4 * GROUPS
    assert all(len(set(group)) == 2 for group in rewards)  # no two members share a coin
    assert play(seed=0) == (rewards, worth)
    assert play(seed=1)[0] != rewards
