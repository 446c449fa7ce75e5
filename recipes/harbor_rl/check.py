"""Checks tasks in the local sandbox: the solution must score 1, an unchanged sandbox 0.

    python -m recipes.harbor_rl.check
    python -m recipes.harbor_rl.check dataset=FOLDER max_tasks=10

If the solution of a task fails, this machine lacks something, such as a package or the network; a
model could not solve the task either.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import chz
from rich.table import Table

from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError
from tinker_cookbook.recipes.harbor_rl.harbor_env import (
    EXAMPLES,
    HarborEnvGroupBuilder,
    HarborTask,
    load_harbor_tasks,
    workdir_of,
)
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console


@chz.chz
class Config:
    """Settings of the check."""

    dataset: str = chz.field(
        default=EXAMPLES, doc="Folder of tasks, or a dataset in Harbor's cache"
    )
    max_tasks: int | None = chz.field(
        default=None, doc="Number of tasks to check; the first ones are used; default: all"
    )
    max_concurrent: int = chz.field(default=4, doc="Tasks that are checked concurrently")
    timeout: int = chz.field(default=120, doc="Seconds for a solution, and for its tests")


@dataclass(frozen=True)
class TaskCheck:
    """Result of a check; a reward is None if there was an error or no solution."""

    task_name: str
    solved: float | None
    untouched: float | None
    seconds: float
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the task works here."""
        return (self.solved, self.untouched) == (1.0, 0.0)


async def check_task(task: HarborTask, timeout: int = 120) -> TaskCheck:
    """Grades the task's solution, and a sandbox in which nothing was done."""
    started = time.monotonic()
    rewards: dict[bool, float] = {}
    error = None
    try:
        for solve in (True, False):
            rewards[solve] = await _reward_of(task, solve, timeout)
    except TinkerCookbookError as caught:
        error = str(caught)
    seconds = time.monotonic() - started
    return TaskCheck(task.task_name, rewards.get(True), rewards.get(False), seconds, error)


async def _reward_of(task: HarborTask, solve: bool, timeout: int) -> float:
    builder = HarborEnvGroupBuilder(task, "", None, 1, 1, 4 * timeout, grader_timeout=timeout)
    sandbox = await builder.new_sandbox()
    try:
        if solve:
            script = task.task_dir / "solution" / "solve.sh"
            if not script.is_file():
                raise ConfigurationError(f"{task.task_name}: there is no solution/solve.sh")
            workdir = workdir_of(task)
            await sandbox.write_file("/solution/solve.sh", script.read_bytes(), executable=True)
            done = await sandbox.run_command("bash /solution/solve.sh", workdir, timeout)
            if done.exit_code:
                said = (done.stderr or done.stdout).strip()[-300:]
                raise ConfigurationError(f"{task.task_name}: solve.sh failed: {said}")
        reward, _ = await builder.reward_of(sandbox, workdir_of(task))([])
        return reward
    finally:
        await sandbox.cleanup()


async def check_tasks(
    tasks: Sequence[HarborTask], timeout: int = 120, max_concurrent: int = 4
) -> list[TaskCheck]:
    """Checks several tasks in parallel; results are in the order of the tasks."""
    slots = asyncio.Semaphore(max_concurrent)

    async def one(task: HarborTask) -> TaskCheck:
        async with slots:
            return await check_task(task, timeout)

    return list(await asyncio.gather(*map(one, tasks)))


async def main(config: Config) -> None:
    """Prints the result of each task."""
    tasks = load_harbor_tasks(config.dataset)[: config.max_tasks]
    results = await check_tasks(tasks, config.timeout, config.max_concurrent)
    table = Table("task", "solution", "untouched", "seconds", "")
    for result in results:
        rewards = ("–" if r is None else f"{r:g}" for r in (result.solved, result.untouched))
        note = "" if result.ok else (result.error or "expected 1 and 0")
        table.add_row(result.task_name, *rewards, f"{result.seconds:.1f}", note)
    console = get_console()
    console.print(table)
    working = sum(result.ok for result in results)
    console.print(f"{working} of {len(results)} tasks work here")


if __name__ == "__main__":
    run_entrypoint(main)
