"""Reinforcement learning from pairwise comparisons: the shorter answer wins.

    python -m recipes.preference.shorter.train
    python -m recipes.preference.shorter.train model_name=… groups_per_batch=32 group_size=16

Each step samples eight answers to each of four questions ("Why is the sky blue?"). Answers are
compared within matchup groups of four. The reward of an answer is ``(wins - losses) / matchups``,
minus 1 if it is empty or truncated.

Watch ``env/all/ac_tokens_per_turn`` (tokens of an answer) and ``test/env/all/win_rate`` (how often
an answer is shorter than one of about ten words): with the demo model they go from 47 to 11 and
from 0.06 to 0.84 in the 20 steps. The mean training reward is always
``mean(format) - 1``, since wins and losses within a group cancel.

The reward does not measure whether an answer is true, so answers get worse: "The heart is where all
life begins" is one of the better ones at the end. At the learning rate of the other RL recipes they
are single words from step 10 on. ``kl_penalty_coef`` keeps the policy closer to the start.
"""

from __future__ import annotations

import chz

from tinker_cookbook.recipes.preference.shorter.env import (
    ShorterComparisonBuilder,
    ShorterPreferenceModelBuilder,
)
from tinker_cookbook.recipes.start import DEMO_MODEL, blocking
from tinker_cookbook.rl import train
from tinker_cookbook.rl.envs.preference_envs import PairwisePreferenceRLDatasetBuilder
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "preference_shorter"
    model_name: str = DEMO_MODEL
    groups_per_batch: int = 4
    group_size: int = 8
    learning_rate: float | None = 1e-4  # 3e-4, as in other RL recipes, leads to one-word answers
    max_tokens: int = 64
    test_group_size: int = chz.field(default=4, doc="Answers to a held-out question")
    num_epochs: int = 4
    max_steps: int | None = 20
    eval_every: int = 5
    save_every: int = 10

    def build_dataset(self) -> PairwisePreferenceRLDatasetBuilder:
        """Returns the questions and the preference model."""
        return PairwisePreferenceRLDatasetBuilder(
            comparison_builder=ShorterComparisonBuilder(),
            batch_size=self.groups_per_batch,
            group_size=self.group_size,
            policy_renderer_name=self.renderer,
            policy_model_name=self.model_name,
            preference_model_builder=ShorterPreferenceModelBuilder(),
            test_group_size=self.test_group_size,
        )


async def main(config: CLIConfig) -> None:
    """Trains a model to answer briefly."""
    await train.main(config)


cli_main = blocking(main)


if __name__ == "__main__":
    run_entrypoint(main)
