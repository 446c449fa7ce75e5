"""Groups in processes that die: of a pool (5 s), of Ray and of Dask (a minute each, slow)."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

import pytest
from environments import python_with, run_in
from rollout_samples import Group, Policy, Steps
from serving import Serving

from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.rl.rollouts import set_rollout_executor
from tinker_cookbook.rl.rollouts.group import run_group

HERE = Path(__file__).parent


class Dying(Steps):
    async def step(self, action, *, extra=None):
        os.kill(os.getpid(), signal.SIGKILL)


class Recording(Executor):
    """As a remote executor: gets values that pickle, and runs nothing here."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def submit(self, fn, /, *args, **kwargs):
        self.calls.append(args)
        done: Future = Future()
        done.set_result(len(self.calls))
        return done


def run_groups(executor, *builders):
    async def run():
        set_rollout_executor(executor)
        return [await run_group(builder, Policy()) for builder in builders]

    return asyncio.run(run())


def test_a_pool_that_lost_a_process_says_so_and_what_would_go_on():
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        pytest.raises(TrainingError, match=r"a process of ProcessPoolExecutor died.*RayExecutor"),
    ):
        run_groups(pool, Group(Dying))


def test_an_unknown_executor_gets_pickled_parts_and_equal_groups_differ():
    executor = Recording()
    assert run_groups(executor, Group(Steps), Group(Steps)) == [1, 2]
    first, second = executor.calls
    assert all(isinstance(part, bytes) for part in first[:3])
    assert first[:3] == second[:3]
    assert first != second  # Dask computes equal calls once
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        run_groups(executor, Group(lambda: Steps()))


@pytest.fixture(scope="module")
def serving(stories_model, tmp_path_factory):
    running = Serving(tmp_path_factory.mktemp("server"), {"model_name": stories_model}).start()
    yield running
    assert running.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ray", "dask"])
def test_groups_of_a_killed_worker_are_run_again(name, serving, stories_model, tmp_path):
    python = python_with("executors")
    output = run_in(
        python,
        str(HERE / "killed_workers.py"),
        name,
        stories_model,
        str(tmp_path),
        TINKER_BASE_URL=serving.url,
        TINKER_API_KEY=serving.key(),
        # Workers import the classes of the script.
        PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parents[2])]),
        RAY_USAGE_STATS_ENABLED="0",
    )
    # Ray prints warnings of dead workers too, also after it.
    (answer,) = [line for line in output.splitlines() if line.startswith('{"equal"')]
    found = json.loads(answer)
    assert found["equal"] == [True] * 3
    assert found["rewards"] == [[2.5, 2.5]] * 3
    assert len(set(found["killed"])) == 3
    # No group ran in the worker that it had killed, and none in the process of the loop. (It may
    # have run in one that another group killed later.)
    for processes, killed in zip(found["processes"], found["killed"], strict=True):
        assert not {killed, found["own"]} & set(processes)
    assert "make_envs of Failing: LookupError: no such task" in found["failed"]
