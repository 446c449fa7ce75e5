"""Tests whether one evaluation is better than another on the same examples.

python -m tinker_cookbook.eval.compare a=/tmp/eval/before b=/tmp/eval/after
python -m tinker_cookbook.eval.compare a=/tmp/eval/before b=/tmp/eval/after task=gsm8k
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import chz

from tinker_cookbook.eval.benchmarks import StoredTrajectory, load_trajectories
from tinker_cookbook.eval.report import comparison_lines
from tinker_cookbook.eval.run.answers import TRAJECTORIES, default_folder
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


def tasks_of(folder: str) -> list[str]:
    """Returns the tasks with answers in an evaluation's folder.

    Raises:
        DataError: there are none.
    """
    found = sorted(path.parent.name for path in Path(folder).expanduser().glob(f"*/{TRAJECTORIES}"))
    if not found:
        raise DataError(
            f"{folder}: has no TASK/{TRAJECTORIES}; expected the out= folder of an evaluation"
        )
    return found


def compare_runs(a: str, b: str, task: str) -> tuple[PairedComparison, list[str]]:
    """Compares answers to the examples in both folders; also returns notes on other examples.

    Raises:
        DataError: the folders have no common example.
    """
    sides = [_rewards(load_trajectories(str(Path(folder).expanduser()), task)) for folder in (a, b)]
    common = [example for example in sides[0] if example in sides[1]]
    if not common:
        raise DataError(
            f"{task}: {a} and {b} have no example in common; did both run the same task?"
        )
    notes = [
        f"{len(side) - len(common)} graded examples are only in {folder} and were skipped"
        for side, folder in zip(sides, (a, b), strict=True)
        if len(side) > len(common)
    ]
    first, second = ([side[example] for example in common] for side in sides)
    return compare_rewards(first, second), notes


def _rewards(rows: list[StoredTrajectory]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.error is None:
            rewards[row.example_id].append(row.reward)
    return rewards


def compare(run_a: str, run_b: str, task: str | None = None) -> dict[str, PairedComparison]:
    """Compares two evaluation folders; returns task -> difference b - a.

    Raises:
        DataError: the folders have no common task.
    """
    tasks = [name for name in tasks_of(run_a) if name in tasks_of(run_b)]
    if task is not None and task not in tasks:
        raise ConfigurationError(
            f"task: {task!r} is not in both folders{nearest_sentence(task, tasks)} Both have: "
            f"{', '.join(tasks)}"
        )
    if not tasks:
        found = (f"{run}: {', '.join(tasks_of(run)) or 'none'}" for run in (run_a, run_b))
        raise DataError(f"{run_a} and {run_b} have no task in common; {'; '.join(found)}")
    return {name: compare_runs(run_a, run_b, name)[0] for name in ([task] if task else tasks)}


def _folder(name: str, field: str) -> str:
    """Returns the folder of an evaluation, which may be named by its checkpoint."""
    path = resolve_weights(name, "sampler_weights", field) or name
    return str(default_folder(path)) if path.startswith(SCHEME) else name


def main(config: Config) -> None:
    """Prints the verdict for each task."""
    console = get_console()
    a, b = _folder(config.a, "a"), _folder(config.b, "b")
    for name, found in compare(a, b, config.task).items():
        for line in comparison_lines(name, found):
            console.print(line, markup=False, soft_wrap=True)
        for note in compare_runs(a, b, name)[1]:
            console.print(f"  {note}", markup=False, soft_wrap=True)
    console.print(f"a = {a}, b = {b}", style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_entrypoint(main)
