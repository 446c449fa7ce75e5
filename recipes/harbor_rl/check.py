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
from tinker_cookbook.rl.rollouts.async_utils import Slots
from tinker_cookbook.training.config import number
from tinker_cookbook.utils.command_line.entrypoint import run_entrypoint
from tinker_cookbook.utils.terminal import get_console


@chz.chz
class Config:
    """Settings of the check."""

    dataset: str = chz.field(
        default=EXAMPLES, doc="Folder of tasks, or a dataset in Harbor's cache"
    )
    max_tasks: int | None = number(None, "Check only the first tasks", low=1)
    max_concurrent: int = number(4, "Tasks that are checked concurrently", low=1)
    timeout: int = number(120, "Seconds for a solution, and for its tests", low=1)


@dataclass(frozen=True)
class TaskCheck:
    """Result of a check: both rewards, or an error."""

    task_name: str
    rewards: tuple[float, ...]
    seconds: float
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the task works here."""
        return self.rewards == (1.0, 0.0)


async def check_task(task: HarborTask, timeout: int = 120) -> TaskCheck:
    """Grades the task's solution, and a sandbox in which nothing was done."""
    started, rewards, error = time.monotonic(), list[float](), ""
    try:
        for solve in (True, False):
            rewards.append(await _reward_of(task, solve, timeout))
    except TinkerCookbookError as caught:
        error = str(caught)
    return TaskCheck(task.task_name, tuple(rewards), time.monotonic() - started, error)


async def _reward_of(task: HarborTask, solve: bool, timeout: int) -> float:
    builder = HarborEnvGroupBuilder(task, "", None, 1, 1, 4 * timeout, grader_timeout=timeout)
    sandbox, workdir = await builder.new_sandbox(), workdir_of(task)
    try:
        if solve:
            script = (task.task_dir / "solution" / "solve.sh").read_bytes()
            await sandbox.write_file("/solution/solve.sh", script, executable=True)
            done = await sandbox.run_command("bash /solution/solve.sh", workdir, timeout)
            if done.exit_code:
                said = (done.stderr or done.stdout).strip()[-300:]
                raise ConfigurationError(f"{task.task_name}: solve.sh failed: {said}")
        reward, _ = await builder.reward_of(sandbox, workdir)([])
        return reward
    finally:
        await sandbox.cleanup()


async def check_tasks(
    tasks: Sequence[HarborTask], timeout: int = 120, max_concurrent: int = 4
) -> list[TaskCheck]:
    """Checks several tasks in parallel; results are in the order of the tasks."""
    slots = Slots(max_concurrent)

    async def one(task: HarborTask) -> TaskCheck:
        async with slots.one():
            return await check_task(task, timeout)

    return await asyncio.gather(*map(one, tasks))


async def main(config: Config) -> None:
    """Prints the result of each task."""
    tasks = load_harbor_tasks(config.dataset)[: config.max_tasks]
    results = await check_tasks(tasks, config.timeout, config.max_concurrent)
    table = Table("task", "solution", "untouched", "seconds", "")
    for result in results:
        rewards = [*(f"{reward:g}" for reward in result.rewards), "–", "–"][:2]
        note = "" if result.ok else (result.error or "expected 1 and 0")
        table.add_row(result.task_name, *rewards, f"{result.seconds:.1f}", note)
    get_console().print(table)
    working = sum(result.ok for result in results)
    get_console().print(f"{working} of {len(results)} tasks work here")


if __name__ == "__main__":
    run_entrypoint(main)
