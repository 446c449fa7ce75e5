"""Routes a question about Tinker to a team, and prints the probability of each team as JSON.

    python -m recipes.decisions.demo
    echo 'How do I pick a learning rate for LoRA?' | python -m recipes.decisions.demo
    python -m recipes.decisions.demo model_path=tinker://RUN/sampler_weights/final

An empty line or Ctrl-D ends the program.
"""

from __future__ import annotations

import asyncio
import json
import sys

import chz

from tinker_cookbook.demo.model import DEMO_MODEL
from tinker_cookbook.recipes.decisions.decision import (
    Decision,
    DecisionRenderer,
    sample_decision,
)
from tinker_cookbook.sampling_model import SamplingModelSettings, open_sampling_model
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint

TEAMS = [
    ("billing", "Prices, invoices, payment methods and credits"),
    ("sdk", "The tinker Python package: how to install it, its calls and its errors"),
    ("console", "The website: sign in, keys, runs and checkpoints"),
    ("cookbook", "Recipes, training loops, chat formats, evaluations and their docs"),
]


@chz.chz
class Config(SamplingModelSettings):
    """Settings of the program."""

    model_name: str | None = chz.field(
        default=DEMO_MODEL, doc="Base model, Hub name or local folder"
    )


async def main(config: Config) -> None:
    """Reads questions and prints the probability of each team."""
    config.check()
    with config.connect() as connection:
        model = await open_sampling_model(connection, config)
        renderer = DecisionRenderer(model.renderer)
        prompt = "Question about Tinker (empty to end): " if sys.stdin.isatty() else ""
        while True:
            try:
                question = (await asyncio.to_thread(input, prompt)).strip()
            except EOFError:
                return
            if not question:
                return
            decision = Decision(f"Which team should answer this question?\n\n{question}", TEAMS)
            found = await sample_decision(model.client, renderer.render(decision))
            print(json.dumps({team: round(p, 4) for team, p in found.items()}, indent=2))


if __name__ == "__main__":
    run_entrypoint(main)
