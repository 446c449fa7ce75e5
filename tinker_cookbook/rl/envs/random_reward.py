"""Random-reward control for learning curves: the same task with random rewards.

If the true score still rises, something other than the reward causes it, such as a leak of the
answer into the prompt or a bug. The score should stay at its first value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import chz
import numpy as np

from tinker_cookbook.rl.rollouts.hooks import call_step
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
)


class _RandomRewardEnv(Env):
    def __init__(self, env: Env, seed: Sequence[int]) -> None:
        self._env = env
        self._rng = np.random.default_rng(seed)
        self.waits_for_members = getattr(env, "waits_for_members", False)

    def rollout_ended(self, failed: bool) -> None:
        ended = getattr(self._env, "rollout_ended", None)
        if ended is not None:
            ended(failed)

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        return await self._env.initial_observation()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        result = await call_step(self._env, action, extra)
        metrics = {**result.metrics, "true_reward": result.reward}
        # Use a random generator, because a function of the answer could be learned.
        reward = float(self._rng.integers(2)) if result.episode_done else 0.0
        return replace(result, reward=reward, metrics=metrics)

    def begin_rollout(self, config: RolloutConfig) -> None:
        # begin_rollout and grade are optional for an environment.
        begin = getattr(self._env, "begin_rollout", None)
        if begin is not None:
            begin(config)

    async def grade(self, stop_reason: StopReason | str) -> tuple[float, Metrics]:
        grade = getattr(self._env, "grade", None)
        if grade is None:
            return 0.0, {}
        reward, metrics = await grade(stop_reason)
        return 0.0, {**metrics, "true_final_reward": reward}


class _RandomRewardGroup(EnvGroupBuilder):
    # The inherited compute_group_rewards ignores the group's reward.
    def __init__(self, group: EnvGroupBuilder, seed: Sequence[int]) -> None:
        self._group, self._seed = group, seed

    async def make_envs(self) -> Sequence[Env]:
        envs = await self._group.make_envs()
        # Seeded by batch, group and member, so that rewards do not depend on timing.
        return [_RandomRewardEnv(env, [*self._seed, i]) for i, env in enumerate(envs)]

    async def cleanup(self) -> None:
        await self._group.cleanup()

    def logging_tags(self) -> list[str]:
        return self._group.logging_tags()


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
    """The data of ``inner`` with random rewards of 0 or 1 at the end of training episodes.

    The test set keeps its rewards; ``env/all/true_reward`` is the replaced reward.
    """

    inner: RLDatasetBuilder = chz.field(doc="The task")
    seed: int = chz.field(default=0, doc="Seed of the random rewards")

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Returns the training data with random rewards, and the test data unchanged."""
        train, test = await self.inner()
        return _RandomRewardDataset(train, self.seed), test

    def check(self) -> None:
        """Validates the task."""
        self.inner.check()
