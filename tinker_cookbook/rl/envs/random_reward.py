"""A control for learning curves: the same task, paid by the toss of a coin.

If the true score still rises, something other than the reward teaches it: a leak from the answer
into the prompt, a length that pays, a bug. It should stay where it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import chz
import numpy as np

from tinker_cookbook.rl.rollouts.episode import call_step
from tinker_cookbook.rl.rollouts.limits import RolloutConfig
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopCondition,
    StopReason,
    Trajectory,
)


class _CoinEnv(Env):
    """Plays ``env``; its own reward becomes the metric ``true_reward``."""

    def __init__(self, env: Env, seed: Sequence[int]) -> None:
        self._env = env
        self._rng = np.random.default_rng(seed)

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """That of the environment."""
        return await self._env.initial_observation()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Pays 0 or 1 at the end of the episode, and nothing before."""
        result = await call_step(self._env, action, extra)
        metrics = {**result.metrics, "true_reward": result.reward}
        reward = float(self._rng.integers(2)) if result.episode_done else 0.0
        return replace(result, reward=reward, metrics=metrics)

    def begin_rollout(self, config: RolloutConfig) -> None:
        """That of the environment, where it has one."""
        begin = getattr(self._env, "begin_rollout", None)
        if begin is not None:
            begin(config)

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
        """Returns the environment's metrics; its reward is withheld."""
        grade = getattr(self._env, "grade", None)
        if grade is None:
            return 0.0, {}
        reward, metrics = await grade(stop_reason)
        return 0.0, {**metrics, "true_final_reward": reward}


class _CoinGroup(EnvGroupBuilder):
    def __init__(self, group: EnvGroupBuilder, seed: Sequence[int]) -> None:
        self._group, self._seed = group, seed

    async def make_envs(self) -> Sequence[Env]:
        envs = await self._group.make_envs()
        return [_CoinEnv(env, [*self._seed, i]) for i, env in enumerate(envs)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        await self._group.cleanup()

    def logging_tags(self) -> list[str]:
        return self._group.logging_tags()


class _CoinDataset(RLDataset):
    def __init__(self, dataset: RLDataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        groups = self._dataset.get_batch(index)
        return [_CoinGroup(group, [self._seed, index, i]) for i, group in enumerate(groups)]

    def __len__(self) -> int:
        return len(self._dataset)

    def set_epoch(self, seed: int) -> None:
        self._dataset.set_epoch(seed)


@chz.chz
class RandomRewardDatasetBuilder(RLDatasetBuilder):
    """The data of ``inner``, of which the training part is paid by chance.

    The test set keeps its rewards, and ``env/all/true_reward`` shows those that were withheld.
    """

    inner: RLDatasetBuilder = chz.field(doc="The task")
    seed: int = chz.field(default=0, doc="Of the coin")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Training data with a coin in the place of the reward, and the test data as they are."""
        train, test = await self.inner()
        return _CoinDataset(train, self.seed), test

    def check(self) -> None:
        """That of the task."""
        self.inner.check()
