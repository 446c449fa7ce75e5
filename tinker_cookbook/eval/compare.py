"""Tests whether one evaluation is better than another on the same examples.

python -m tinker_cookbook.eval.compare a=/tmp/eval/before b=/tmp/eval/after
python -m tinker_cookbook.eval.compare a=/tmp/eval/before b=/tmp/eval/after task=gsm8k
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import chz

from tinker_cookbook.eval.report import comparison_lines
from tinker_cookbook.eval.run.answers import default_folder, load_trajectories, tasks_of
from tinker_cookbook.eval.statistics import PairedComparison, compare_rewards
from tinker_cookbook.exceptions import ConfigurationError, DataError, nearest_sentence
from tinker_cookbook.run.weights_paths import FORMS, SCHEME, resolve_weights
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console


@chz.chz
class Config:
    """Settings of the comparison."""

    a: str = chz.field(
        doc="First evaluation: its out= folder, or the checkpoint that was evaluated without out= "
        f"({FORMS})"
    )
    b: str = chz.field(doc="Second evaluation, likewise")
    task: str | None = chz.field(default=None, doc="Task; default: all that both folders have")


def compare_runs(a: str, b: str, task: str) -> tuple[PairedComparison, list[str]]:
    """Compares answers to the examples in both folders; also returns notes on other examples.

    Raises:
        DataError: the folders have no common example.
    """
    rewards: dict[str, dict[str, list[float]]] = {}
    for folder in (a, b):
        found = rewards[folder] = defaultdict(list)
        for row in load_trajectories(str(Path(folder).expanduser()), task):
            if row.error is None:
                found[row.example_id].append(row.reward)
    common = [example for example in rewards[a] if example in rewards[b]]
    if not common:
        raise DataError(
            f"{task}: {a} and {b} have no example in common; did both run the same task?"
        )
    notes = [
        f"{len(found) - len(common)} graded examples are only in {folder} and were skipped"
        for folder, found in rewards.items()
        if len(found) > len(common)
    ]
    first, second = ([rewards[folder][example] for example in common] for folder in (a, b))
    return compare_rewards(first, second), notes


def compare(run_a: str, run_b: str, task: str | None = None) -> dict[str, PairedComparison]:
    """Compares two evaluation folders; returns task -> difference b - a.

    Raises:
        DataError: the folders have no common task.
    """
    return {name: compare_runs(run_a, run_b, name)[0] for name in _tasks(run_a, run_b, task)}


def _tasks(run_a: str, run_b: str, task: str | None) -> list[str]:
    of_a, of_b = tasks_of(run_a), tasks_of(run_b)
    tasks = [name for name in of_a if name in of_b]
    if task is not None and task not in tasks:
        raise ConfigurationError(
            f"task: {task!r} is not in both folders{nearest_sentence(task, tasks)} Both have: "
            f"{', '.join(tasks)}"
        )
    if not tasks:
        raise DataError(
            f"{run_a} and {run_b} have no task in common; {run_a}: {', '.join(of_a)}; {run_b}: "
            f"{', '.join(of_b)}"
        )
    return tasks if task is None else [task]


def _folder(name: str, field: str) -> str:
    """Returns the folder of an evaluation, which may be named by its checkpoint."""
    path = resolve_weights(name, "sampler_weights", field) or name
    return str(default_folder(path)) if path.startswith(SCHEME) else name


def main(config: Config) -> None:
    """Prints the verdict for each task."""
    console = get_console()
    a, b = _folder(config.a, "a"), _folder(config.b, "b")
    for name in _tasks(a, b, config.task):
        found, notes = compare_runs(a, b, name)
        for line in (*comparison_lines(name, found), *(f"  {note}" for note in notes)):
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"a = {a}, b = {b}", style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_entrypoint(main)
