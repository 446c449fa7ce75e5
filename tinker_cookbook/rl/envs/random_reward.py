"""Random-reward control for learning curves: the same task with random rewards.

If the true score still rises, something other than the reward causes it, such as a leak of the
answer into the prompt or a bug. The score should stay at its first value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chz
import numpy as np

from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    RLDataset,
    RLDatasetBuilder,
    Trajectory,
)
from tinker_cookbook.training.config import setting


class _RandomRewardGroup(EnvGroupBuilder):
    def __init__(self, group: EnvGroupBuilder, seed: Sequence[int]) -> None:
        self._group, self._seed = group, seed
        self.make_env, self.cleanup = group.make_env, group.cleanup
        self.logging_tags = group.logging_tags

    async def make_envs(self) -> Sequence[Env]:
        return await self._group.make_envs()

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        rewards: list[tuple[float, Metrics]] = []
        for member, trajectory in enumerate(trajectory_group):
            for turn in trajectory.transitions:
                turn.metrics["true_reward"], turn.reward = turn.reward, 0.0
            # A random generator, because a function of the answer could be learned. Seeded by
            # batch, group and member, so that rewards do not depend on timing.
            coin = np.random.default_rng([*self._seed, member]).integers(2)
            rewards.append((float(coin) if trajectory.transitions else 0.0, {}))
        return rewards


class _RandomRewardDataset(RLDataset):
    def __init__(self, dataset: RLDataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self.set_epoch = dataset.set_epoch

    def data_sources(self) -> dict[str, Any]:
        return {"": self._dataset}

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        groups = self._dataset.get_batch(index)
        return [_RandomRewardGroup(group, [self._seed, index, i]) for i, group in enumerate(groups)]

    def __len__(self) -> int:
        return len(self._dataset)


@chz.chz
class RandomRewardDatasetBuilder(RLDatasetBuilder):
    """The data of ``inner`` with a random reward of 0 or 1 for each training episode.

    The test set keeps its rewards; ``env/all/true_reward`` is the replaced reward of a step.
    """

    inner: RLDatasetBuilder = chz.field(doc="The task")
    seed: int = setting(0, "Seed of the random rewards")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the training data with random rewards, and the test data unchanged."""
        train, test = await self.inner()
        return _RandomRewardDataset(train, self.seed), test

    def check(self) -> None:
        """Validates the task."""
        self.inner.check()
