"""Groups whose first worker is killed, in processes of Ray or of Dask; run where both are.

python killed_workers.py ray|dask MODEL FOLDER      (TINKER_BASE_URL and TINKER_API_KEY are set)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from rollout_samples import Group, Steps

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.rollouts import (
    RayExecutor,
    RolloutFailedError,
    do_group_rollout,
    set_rollout_executor,
)
from tinker_cookbook.rl.rollouts.group import run_group

GROUPS = 3


class Killed(Steps):
    """Its first step kills the worker; when it is run again, it says in which process."""

    def __init__(self, marker: str | None) -> None:
        super().__init__(turns=2)
        self.marker = marker

    async def step(self, action, *, extra=None):
        if self.marker is not None and not Path(self.marker).exists():
            Path(self.marker).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        result = await super().step(action, extra=extra)
        result.metrics = {"process": os.getpid()}
        return result


class KilledGroup(Group):
    """Two members; the marker is a file that does not exist yet."""

    def __init__(self, marker: str | None) -> None:
        super().__init__()
        self.marker = marker

    async def make_envs(self):
        return [Killed(self.marker), Killed(None)]


class Failing(Group):
    """Fails while it makes environments."""

    async def make_envs(self):
        raise LookupError("no such task")


@contextmanager
def executor_of(name: str) -> Iterator[Executor]:
    if name == "ray":
        yield RayExecutor(num_cpus=1)
        import ray

        ray.shutdown()
        return
    import dask.config
    from distributed import Client, LocalCluster

    with (
        # Workers that other groups kill, or that are slow to start, count for each group of theirs.
        dask.config.set({"distributed.scheduler.allowed-failures": 20}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client.get_executor()


def main(name: str, model: str, folder: str) -> None:
    service = connect("tinker").service
    client = service.create_sampling_client(base_model=model)
    policy = TinkerTokenCompleter(client, 4, seed=3)

    async def run(executor: Executor) -> dict:
        here = await do_group_rollout(KilledGroup(None), policy)
        set_rollout_executor(executor)
        markers = [f"{folder}/{name}-{number}" for number in range(GROUPS)]
        there = await asyncio.gather(*(run_group(KilledGroup(m), policy) for m in markers))
        try:
            await run_group(Failing(), policy)
            failed = ""
        except RolloutFailedError as error:
            failed = str(error)
        return {
            "equal": [answers(group) == answers(here) for group in there],
            "processes": [[*processes(group)] for group in there],
            "killed": [int(Path(marker).read_text()) for marker in markers],
            "rewards": [group.get_total_rewards() for group in there],
            "own": os.getpid(),
            "failed": failed,
        }

    with executor_of(name) as executor:
        print(json.dumps(asyncio.run(run(executor))))


def answers(group):
    steps = [step for trajectory in group.trajectories_G for step in trajectory.transitions]
    return [(step.ac.tokens, step.ac.logprobs) for step in steps]


def processes(group):
    steps = [step for trajectory in group.trajectories_G for step in trajectory.transitions]
    return {step.metrics["process"] for step in steps}


if __name__ == "__main__":
    # Workers cannot import __main__, so the classes above are taken from the module of this file.
    import killed_workers

    killed_workers.main(*sys.argv[1:])
