"""Prints stored answers: the conversation, the extracted answer, the reward.

python -m tinker_cookbook.eval.show /tmp/eval/after task=gsm8k incorrect_only=True
python -m tinker_cookbook.eval.show /tmp/eval/after idx=3
"""

from __future__ import annotations

import sys
from pathlib import Path

import chz

from tinker_cookbook.eval.run.answers import load_trajectories, print_trajectory, tasks_of
from tinker_cookbook.exceptions import ConfigurationError, nearest_sentence
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console


@chz.chz
class Config:
    """Settings of the view."""

    run: str = chz.field(doc="Folder of the evaluation (its out=); run= may be omitted")
    task: str | None = chz.field(default=None, doc="Task; default: the first one")
    idx: int | None = chz.field(default=None, doc="Index of one problem; default: all problems")
    correct_only: bool = chz.field(default=False, doc="Only right answers")
    incorrect_only: bool = chz.field(default=False, doc="Only answers below the full reward")
    errors_only: bool = chz.field(default=False, doc="Only answers without a grade")
    limit: int = chz.field(default=3, doc="Maximum number of answers to print")


def main(config: Config) -> None:
    """Prints the selected answers."""
    tasks = tasks_of(config.run)
    task = config.task or tasks[0]
    if task not in tasks:
        raise ConfigurationError(
            f"task: {config.run} has no answers of {task!r}{nearest_sentence(task, tasks)} "
            f"It has: {', '.join(tasks)}"
        )
    rows = load_trajectories(
        str(Path(config.run).expanduser()),
        task,
        config.correct_only,
        config.incorrect_only,
        config.errors_only,
    )
    if config.idx is not None:
        rows = [row for row in rows if row.idx == config.idx]
    for row in rows[: config.limit]:
        print_trajectory(row)
    console, shown = get_console(), min(config.limit, len(rows))
    console.print(f"\n{shown} of {len(rows)} answers of {task}", style="dim")


if __name__ == "__main__":
    # The folder may be the first argument, without its key.
    if len(sys.argv) > 1 and "=" not in sys.argv[1] and not sys.argv[1].startswith("-"):
        sys.argv[1] = f"run={sys.argv[1]}"
    run_entrypoint(main)
