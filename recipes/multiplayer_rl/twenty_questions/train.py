"""Reinforcement learning on twenty questions: a model finds a word that another model knows.

    python -m recipes.multiplayer_rl.twenty_questions.train
    python -m recipes.multiplayer_rl.twenty_questions.train answerer_model_name=… max_questions=10

The other model answers the questions with yes or no. It is the same model before training, unless
``answerer_model_name`` names another. The demo model is too small to win a game; a model of some
billions of parameters learns it.
"""

from __future__ import annotations

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import (
    WORDS,
    AnswererConfig,
    Rules,
    TwentyQuestionsDatasetBuilder,
)
from tinker_cookbook.recipes.start import fill
from tinker_cookbook.rl import train
from tinker_cookbook.rl.settings import RLSettings, rl_config, run
from tinker_cookbook.training.config import check_model
from tinker_cookbook.utils.checkpoints.weights_paths import weights_field
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(RLSettings):
    """Settings of the recipe, in addition to those of every RL recipe."""

    answerer_model_name: str | None = chz.field(
        default=None, doc="Model that answers; default: model_name, untrained"
    )
    answerer_renderer_name: str | None = chz.field(
        default=None, doc="Chat format of that model; default: the model's own"
    )
    answerer_path: str | None = weights_field("sampler_weights", "Its adapter; default: none")
    answerer_max_tokens: int = chz.field(default=5, doc="Maximum tokens of one of its answers")
    words_path: str = chz.field(
        default=str(WORDS), doc="File with the words to guess, one per line"
    )
    max_questions: int = chz.field(
        default=20, doc="Maximum number of questions and guesses in a game"
    )
    malformed_reward: float = chz.field(default=-0.1, doc="Reward of a message that was cut off")
    num_test: int = chz.field(default=16, doc="Words held out for evaluation; 0: no evaluation")
    max_tokens: int = chz.field(default=24, doc="Maximum tokens of a question")


def build_config(cli: CLIConfig) -> train.Config:
    """Builds the game, its answerer and the config of the run."""
    check_model(cli)
    if cli.answerer_max_tokens < 1:
        raise ConfigurationError(
            f"answerer_max_tokens: got {cli.answerer_max_tokens}, expected at least 1"
        )
    # The same model has the same chat format; another model has its own.
    other = cli.answerer_model_name is not None and cli.answerer_model_name != cli.model_name
    answerer = fill(
        AnswererConfig,
        cli,
        model_name=cli.answerer_model_name or cli.model_name,
        renderer_name=cli.answerer_renderer_name or (None if other else cli.renderer),
        model_path=cli.answerer_path,
        max_tokens=cli.answerer_max_tokens,
    )
    dataset = fill(TwentyQuestionsDatasetBuilder, cli, answerer=answerer, rules=fill(Rules, cli))
    return rl_config(cli, "twenty_questions", dataset)


async def main(config: CLIConfig) -> None:
    """Trains the model that guesses the word."""
    await run(config, build_config(config))


if __name__ == "__main__":
    run_entrypoint(main)
