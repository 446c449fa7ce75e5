"""Reinforcement learning with images: count shapes, read a number, read a bar chart.

    python -m recipes.vision_rl.train
    python -m recipes.vision_rl.train kinds=count
    python -m recipes.vision_rl.train model_name=Qwen/Qwen3-VL-2B-Instruct max_tokens=64
    python -m recipes.vision_rl.train random_rewards=true   # random-reward control

The pictures are generated, so an answer is graded exactly. The default model is a tiny Qwen3-VL,
which the recipe makes first: a short supervised training, in which half of the answers are off by
one, teaches it to see but not to be exact. The reward on held-out pictures rises from 0.38 - 0.53
to 0.63 - 0.75 in 100 steps (2 minutes).
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.tiny_models.llama import TinyModelSettings, make_model_once
from tinker_cookbook.recipes.tiny_models.vlm import RENDERER, Example, example_of, make_tiny_vlm
from tinker_cookbook.recipes.vision_rl.env import START_SEED, PictureDatasetBuilder
from tinker_cookbook.recipes.vision_rl.pictures import KINDS, Kind, make_pictures, texts
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl import train
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

TINY = "tiny"


@chz.chz
class CLIConfig(train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "vision_rl"
    model_name: str = chz.field(
        default=TINY, doc="Hub name or folder of a model; tiny: one that the recipe makes"
    )
    kinds: list[Kind] = chz.field(
        default_factory=lambda: list(KINDS), doc=f"Of {', '.join(KINDS)}, separated by commas"
    )
    groups_per_batch: int = 16
    group_size: int = 8
    n_batches: int = number(200, "Steps per epoch", low=1)
    num_test: int = number(120, "Pictures to evaluate on; 0: no evaluation")
    max_tokens: int = 4
    lora_rank: int = 64
    learning_rate: float | None = chz.field(default=None, doc="Default: 1e-3 for the tiny model")
    max_steps: int | None = 100
    save_every: int = 50

    def build_dataset(self) -> PictureDatasetBuilder:
        """Returns the pictures."""
        return self.builder_of(PictureDatasetBuilder)


def make_model(cli: CLIConfig) -> CLIConfig:
    """Returns the settings with the tiny model's folder, which is made if it is absent."""
    # The name includes everything that the model depends on, so that another run can reuse it.
    folder = cli_utils.default_log_path(f"vision_rl_tiny_{'_'.join(cli.kinds)}")
    settings = TinyModelSettings(output=folder, steps=300, batch_size=64, learning_rate=1e-3)
    make_model_once(
        folder, lambda: make_tiny_vlm(folder, texts(), partial(_examples, cli), settings)
    )
    return chz.replace(
        cli,
        model_name=folder,
        renderer_name=cli.renderer_name or RENDERER,
        learning_rate=cli.learning_rate or 1e-3,
        # What it sees is as unfinished as what it says.
        train_vision=True,
    )


def _examples(cli: CLIConfig, folder: Path) -> list[Example]:
    """Returns pictures with answers, of which half are right and the others one less or more; other
    pictures than those of RL."""
    rng = random.Random(START_SEED)
    examples: list[Example] = []
    for picture in make_pictures(3000, START_SEED, cli.kinds):
        image, _, answer = picture.draw()
        if rng.random() >= 0.5:
            answer = str(int(answer) + rng.choice((-1, 1)))
        messages = [picture.message(), Message(role="assistant", content=answer)]
        examples.append(example_of(folder, messages, image))
    return examples


async def main(config: CLIConfig) -> None:
    """Trains a model to answer questions about pictures."""
    tiny = config.model_name == TINY
    await train.main(await asyncio.to_thread(make_model, config) if tiny else config)


if __name__ == "__main__":
    run_entrypoint(main)
