"""Tests whether one evaluation is better than another on the same examples.

python -m tinker_cookbook.eval.compare a=/tmp/eval/before b=/tmp/eval/after
python -m tinker_cookbook.eval.compare a=/tmp/eval/before b=/tmp/eval/after task=gsm8k
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook.eval.report import comparison_lines
from tinker_cookbook.eval.run.answers import default_folder, load_trajectories, tasks_of
from tinker_cookbook.eval.statistics import PairedComparison, compare_rewards
from tinker_cookbook.exceptions import DataError
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


def compare(run_a: str, run_b: str, task: str | None = None) -> dict[str, PairedComparison]:
    """Compares the examples that two evaluation folders share; returns task -> difference b - a.

    Raises:
        DataError: the folders have no common task, or no common example of a task.
    """
    of_a, of_b = tasks_of(run_a), tasks_of(run_b)
    tasks = [name for name in of_a if name in of_b and task in (None, name)]
    if not tasks:
        raise DataError(
            f"task: got {task or 'any'}, expected one that both have; {run_a}: {', '.join(of_a)}; "
            f"{run_b}: {', '.join(of_b)}"
        )
    found: dict[str, PairedComparison] = {}
    for name in tasks:
        a, b = _rewards(run_a, name), _rewards(run_b, name)
        common = [example for example in a if example in b]
        if not common:
            raise DataError(f"{name}: {run_a} and {run_b} have no example in common")
        found[name] = compare_rewards([a[x] for x in common], [b[x] for x in common])
    return found


def _rewards(folder: str, task: str) -> dict[str, list[float]]:
    """Returns the rewards of the graded answers to each example."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in load_trajectories(str(Path(folder).expanduser()), task):
        if row.error is None:
            found[row.example_id].append(row.reward)
    return found


def _folder(name: str, field: str) -> str:
    """Returns the folder of an evaluation, which may be named by its checkpoint."""
    path = resolve_weights(name, "sampler_weights", field) or name
    return str(default_folder(path)) if path.startswith(SCHEME) else name


def main(config: Config) -> None:
    """Prints the verdict for each task."""
    say = partial(get_console().print, markup=False, soft_wrap=True)
    a, b = _folder(config.a, "a"), _folder(config.b, "b")
    for name, found in compare(a, b, config.task).items():
        for line in comparison_lines(name, found):
            say(line)
    say(f"a = {a}, b = {b}", style="dim")


if __name__ == "__main__":
    run_entrypoint(main)
