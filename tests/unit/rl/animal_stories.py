"""A task that the 260k-parameter story model learns in seconds: name a dog or a cat.

Also a small recipe, for tests that need a process of their own: ``python -m animal_stories …``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import chz
import tinker

from tinker_cookbook import cli_utils
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

logger = logging.getLogger(__name__)

OPENINGS = (
    "Once upon a time, there was a little",
    "One day, Lily went to the park and saw a",
    "Tom was playing in the garden with his",
    "Mom said: look, there is a small",
)
ANIMALS = ("dog", "cat")


class StoryEnv(Env):
    """One turn: the model goes on with an opening; 1 for naming an animal that is wanted."""

    def __init__(self, builder: StoryGroupBuilder, member: int) -> None:
        self._builder, self._member = builder, member
        self._tokenizer = get_tokenizer(builder.model)

    async def initial_observation(self):
        ids = self._tokenizer.encode(self._builder.opening, add_special_tokens=True)
        return tinker.ModelInput.from_ints(ids), []

    async def step(self, action):  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(self._builder.delay)
        text = str(self._tokenizer.decode(action))
        logtree.log_text(f"heard: {text}")
        return StepResult(
            reward=self._builder.reward(text),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics={"length": len(text)},
            logs={"text": text},
        )


class StoryGroupBuilder(EnvGroupBuilder):
    """A group of one opening. ``reward_for`` is animals, length, constant, nan or error."""

    def __init__(
        self,
        model,
        opening,
        group_size,
        reward_for="animals",
        delay=0.0,
        tag="story",
    ):
        self.model, self.opening, self.group_size = model, opening, group_size
        self.reward_for, self.delay, self.tag = reward_for, delay, tag

    async def make_envs(self):
        return [StoryEnv(self, member) for member in range(self.group_size)]

    async def compute_group_rewards(self, trajectory_group, env_group):
        logger.info("%s is done", self.tag)
        return await super().compute_group_rewards(trajectory_group, env_group)

    def reward(self, text: str) -> float:
        if self.reward_for == "constant":
            return 0.0
        if self.reward_for == "nan":
            return float("nan")
        if self.reward_for == "error":
            raise OSError("the judge is away")
        if self.reward_for == "length":  # varies in every group, whatever the model
            return len(text) / 50
        return float(any(animal in text for animal in ANIMALS))

    def logging_tags(self):
        return [self.tag]


class StoryDataset(RLDataset):
    """``num_batches`` batches; which opening stands where changes with the epoch."""

    def __init__(self, builder: Any) -> None:
        self._builder, self._shift = builder, 0

    def set_epoch(self, seed: int) -> None:
        self._shift = seed

    def __len__(self) -> int:
        return self._builder.num_batches

    def get_batch(self, index: int):
        b = self._builder
        start = index * b.groups_per_batch + self._shift
        places = range(start, start + b.groups_per_batch)
        return [
            StoryGroupBuilder(
                b.model,
                OPENINGS[place % len(OPENINGS)],
                b.group_size,
                b.reward_for,
                delay=b.slow_seconds if place % len(OPENINGS) == 0 else 0.0,
                tag=f"opening_{place % len(OPENINGS)}",
            )
            for place in places
        ]


@chz.chz
class StoryDatasetBuilder(RLDatasetBuilder):
    model: str
    num_batches: int = 2
    groups_per_batch: int = 4
    group_size: int = 4
    reward_for: str = "animals"
    slow_seconds: float = 0.0
    test_groups: int = 0

    async def __call__(self):
        test = None
        if self.test_groups:
            test = StoryDataset(
                chz.replace(
                    self, num_batches=1, groups_per_batch=self.test_groups, slow_seconds=0.0
                )
            )
        return StoryDataset(self), test


def story_config(model: str, log_path, data=None, **settings) -> train.Config:
    """A run of a few short steps; ``data`` changes the dataset, ``settings`` the config."""
    defaults = {
        "learning_rate": 0.01,
        "max_tokens": 10,
        "lora_rank": 4,
        "backend": "local",
        "device": "cpu",
        "dtype": "float32",
        "save_every": 0,
    }
    return train.Config(
        log_path=str(log_path),
        model_name=model,
        recipe_name="animal_stories",
        dataset_builder=StoryDatasetBuilder(model=model, **(data or {})),
        **{**defaults, **settings},
    )


MODES = {
    "sync": {},
    "stream": {
        "stream_minibatch_config": train.StreamMinibatchConfig(
            groups_per_batch=4, num_minibatches=2
        )
    },
    "async": {"async_config": train.AsyncConfig(max_steps_off_policy=2, groups_per_batch=4)},
}


@chz.chz
class CLIConfig(train.Config):
    recipe_name: str = "animal_stories"
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior | None = "raise"
    learning_rate: float | None = 0.002
    loss_normalization: str = "sum"
    max_tokens: int = 10
    eval_every: int = 10
    mode: str = "sync"
    num_batches: int = 4
    slow_seconds: float = 0.0
    reward_for: str = "animals"

    def build_dataset(self) -> StoryDatasetBuilder:
        return StoryDatasetBuilder(
            model=self.model_name,
            num_batches=self.num_batches,
            slow_seconds=self.slow_seconds,
            reward_for=self.reward_for,
            test_groups=2,
        )


async def main(cli: CLIConfig) -> None:
    """Trains in the mode asked for."""
    await train.main(chz.replace(cli, **MODES[cli.mode]))


if __name__ == "__main__":
    run_entrypoint(main)
