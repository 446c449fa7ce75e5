"""A task that any model can learn, however small: to have certain words in what it writes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import chz

from tinker_cookbook.rl.envs.problem_dataset import ProblemDataset
from tinker_cookbook.rl.envs.problem_env import ProblemGroupBuilder
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer


class NamingEnv(Env):
    """Goes on with a text; 1 for one of the words. ``coin`` pays by chance instead."""

    def __init__(self, model: str, opening: str, words: Sequence[str], coin: random.Random | None):
        self.tokenizer = get_tokenizer(model)
        self.opening, self.words, self.coin = opening, words, coin

    async def initial_observation(self):
        import tinker

        ids = self.tokenizer.encode(self.opening, add_special_tokens=True)
        return tinker.ModelInput.from_ints(ids), []

    async def step(self, action):
        import tinker  # not at the top: the package sets OpenMP up before torch is loaded

        text = self.tokenizer.decode(action)
        named = float(any(word in text for word in self.words))
        return StepResult(
            reward=named if self.coin is None else float(self.coin.random() < 0.5),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics={"named": named},
        )


@chz.chz
class NamingDatasetBuilder(RLDatasetBuilder):
    model: str
    words: list[str]
    openings: list[str]
    num_batches: int = 5
    groups_per_batch: int = 8
    group_size: int = 16
    random_rewards: bool = False

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        coin = random.Random(0) if self.random_rewards else None

        def group(opening: str) -> EnvGroupBuilder:
            env = partial(NamingEnv, self.model, opening, self.words, coin)
            return ProblemGroupBuilder(env, self.group_size, "naming")

        problems = [
            self.openings[i % len(self.openings)]
            for i in range(self.num_batches * self.groups_per_batch)
        ]
        return ProblemDataset(problems, group, self.groups_per_batch, shuffle=False), None
