"""Measures how well a judge agrees with labelled answers; nothing is trained.

python -m recipes.rubric.agreement
python -m recipes.rubric.agreement labelled_path=labelled.jsonl model_name=… mode=text
python -m recipes.rubric.agreement url=https://api.openai.com/v1 model_name=gpt-4o-mini
"""

from __future__ import annotations

from contextlib import nullcontext

import chz

from tinker_cookbook.backends.connect import connect_with
from tinker_cookbook.judges.agreement import Agreement
from tinker_cookbook.judges.settings import JudgeSettings, LazyJudge
from tinker_cookbook.recipes.rubric.data import load_labelled
from tinker_cookbook.recipes.rubric.env import judge_agreement, print_agreement
from tinker_cookbook.recipes.start import DEMO_MODEL, example_data
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint


@chz.chz
class CLIConfig(JudgeSettings):
    """Settings of the program."""

    model_name: str = chz.field(
        default=DEMO_MODEL, doc="Hub name or local folder of the judge; with url: its name"
    )
    labelled_path: str | None = chz.field(
        default=None, doc="JSONL file of labelled answers; default: the example data"
    )


async def main(config: CLIConfig) -> Agreement:
    """Grades the labelled answers and prints the agreement."""
    config.check()
    labelled = load_labelled(config.labelled_path or example_data("rubric_labelled.jsonl"))
    # A judge of this machine uses the open connection, which is closed at the end.
    with connect_with(config) if config.url is None else nullcontext():
        agreement = await judge_agreement(LazyJudge(config), labelled)
    print_agreement(agreement, config)
    return agreement


if __name__ == "__main__":
    run_entrypoint(main)
