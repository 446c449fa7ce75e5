"""True-thinking scores of the answers to three problems, which need no data.

python -m recipes.true_thinking_score.run_small_experiment model_name=…
"""

from __future__ import annotations

from pathlib import Path

import chz

from tinker_cookbook import cli_utils
from tinker_cookbook.recipes.math_rl.problems import Problem
from tinker_cookbook.recipes.true_thinking_score.analyze import ScoreSettings, run
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

PROBLEMS = [
    {"question": "How many of the numbers from 1 to 60 have no factor 2 or 3?", "answer": "20"},
    {
        "question": "Four cards have the numbers 2, 3, 5 and 8. Two cards are taken at random. "
        "What is the probability that their sum is even? Answer with a fraction.",
        "answer": "1/3",
    },
    {
        "question": "The sum of two numbers is 25 and their product is 144. What is the larger?",
        "answer": "16",
    },
]


@chz.chz
class CLIConfig(ScoreSettings):
    """Settings of the program."""

    max_tokens: int = number(2048, "Maximum tokens of an answer", low=1)


async def main(config: CLIConfig) -> None:
    """Scores the answers to three problems."""
    path = Path(config.log_path or cli_utils.default_log_path("tts-experiment")).expanduser()
    await run(config, [Problem(**problem) for problem in PROBLEMS], path)


if __name__ == "__main__":
    run_entrypoint(main)
