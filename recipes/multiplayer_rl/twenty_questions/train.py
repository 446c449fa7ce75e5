"""Reinforcement learning on twenty questions: a model finds a word that another model knows.

    python -m recipes.multiplayer_rl.twenty_questions.train
    python -m recipes.multiplayer_rl.twenty_questions.train answerer_model_name=… max_questions=10

The other model answers the questions with yes or no. It is the same model before training, unless
``answerer_model_name`` names another. The demo model is too small to win a game; a model of some
billions of parameters learns it.
"""

from __future__ import annotations

import chz

from tinker_cookbook.backends.sampler_options import SamplerOptions
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import (
    WORDS,
    AnswererConfig,
    Rules,
    TwentyQuestionsDatasetBuilder,
)
from tinker_cookbook.recipes.start import DEMO_MODEL
from tinker_cookbook.rl import train
from tinker_cookbook.run.weights_paths import weights_field
from tinker_cookbook.training.config import BackendSettings
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(Rules, train.Config):
    """Settings of the recipe, in addition to those of the loop."""

    recipe_name: str = "twenty_questions"
    model_name: str = DEMO_MODEL
    groups_per_batch: int = 8
    group_size: int = 8
    learning_rate: float | None = None  # a quarter of the recommended rate
    max_tokens: int = 24
    answerer_model_name: str | None = chz.field(
        default=None, doc="Model that answers; default: model_name, untrained"
    )
    answerer_path: str | None = weights_field("sampler_weights", "Its adapter; default: none")
    words_path: str = chz.field(
        default=str(WORDS), doc="File with the words to guess, one per line"
    )
    num_test: int = chz.field(default=16, doc="Words held out for evaluation; 0: no evaluation")

    def build_dataset(self) -> TwentyQuestionsDatasetBuilder:
        """Returns the game and its answerer."""
        # The same model has the same chat format; another model has its own.
        other = self.answerer_model_name not in (None, self.model_name)
        answerer = AnswererConfig(
            model_name=self.answerer_model_name or self.model_name,
            renderer_name=None if other else self.renderer,
            model_path=self.answerer_path,
            **self.values_of(BackendSettings),
            **self.values_of(SamplerOptions),
        )
        rules = Rules(**self.values_of(Rules))
        return self.builder_of(TwentyQuestionsDatasetBuilder, answerer=answerer, rules=rules)


def build_config(cli_config: CLIConfig) -> train.Config:
    """Returns the config of the loop."""
    return cli_config.resolved()


async def main(config: CLIConfig) -> None:
    """Trains the model that guesses the word."""
    await train.main(config)


if __name__ == "__main__":
    run_entrypoint(main)
