"""Group rollouts in the threads or processes of a pool."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
from rollout_samples import Group, Policy, Steps

from tinker_cookbook.backends import connect
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts.group import (
    do_group_rollout,
    get_rollout_executor,
    run_group,
    set_rollout_executor,
)
from tinker_cookbook.rl.rollouts.limits import RolloutConfig
from tinker_cookbook.rl.rollouts.strategy import RetryOnFailure
from tinker_cookbook.rl.types import StepResult


class Where(Steps):
    """Environment whose metrics name its process and thread."""

    async def step(self, action, *, extra=None):
        result: StepResult = await super().step(action, extra=extra)
        result.metrics = {"process": os.getpid(), "thread": threading.get_ident()}
        return result


def run_in(executor, builder, policy=None, **options):
    async def run():
        set_rollout_executor(executor)
        return await run_group(builder, policy or Policy(), **options)

    return asyncio.run(run())


def here(group):
    metrics = group.trajectories_G[0].transitions[0].metrics
    return metrics["process"] == os.getpid(), metrics["thread"] == threading.get_ident()


def test_threads_return_the_same_group():
    builder = Group(Where, lambda: Where(turns=2))
    with ThreadPoolExecutor(1) as pool:
        group = run_in(pool, builder, strategy=RetryOnFailure(), config=RolloutConfig())
    assert here(group) == (True, False)
    inline = asyncio.run(do_group_rollout(Group(Where, lambda: Where(turns=2)), Policy()))
    assert group.get_total_rewards() == inline.get_total_rewards()
    assert [t.final_ob for t in group.trajectories_G] == [t.final_ob for t in inline.trajectories_G]
    assert builder.cleaned == 1


def test_threads_sample_from_the_local_engine(stories_model):
    service = connect("local", device="cpu", dtype="float32").service
    client = service.create_sampling_client(base_model=stories_model).result()
    policy = TinkerTokenCompleter(client, 3, seed=2)
    with ThreadPoolExecutor(2) as pool:
        group = run_in(pool, Group(Steps, Steps), policy)
        inline = asyncio.run(do_group_rollout(Group(Steps, Steps), policy))
        with pytest.raises(ConfigurationError, match=r"ThreadPoolExecutor .*local engine"):
            run_in(_spawning(), Group(Steps, Steps), policy)
    assert _answers(group) == _answers(inline)


def _answers(group):
    turns = [trajectory.transitions[0] for trajectory in group.trajectories_G]
    return [(turn.ac.tokens, turn.ac.logprobs) for turn in turns]


def _spawning():
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def test_processes_run_what_pickles():
    with _spawning() as pool:
        group = run_in(pool, Group(Where, Where))
        assert here(group)[0] is False
        assert group.get_total_rewards() == [1.5, 1.5]
        with pytest.raises(
            ConfigurationError, match=r"group's builder \(Group\) cannot be pickled"
        ):
            run_in(pool, Group(lambda: Where()))


def test_the_executor_belongs_to_its_context():
    async def run():
        with ThreadPoolExecutor(1) as pool:

            async def inner():
                set_rollout_executor(pool)
                return get_rollout_executor() is pool

            assert await asyncio.create_task(inner())
            assert get_rollout_executor() is None

    asyncio.run(run())


@pytest.mark.parametrize("busy", [False, True])
def test_cancelling_reaches_the_thread(busy):
    builder, policy, release = Group(Steps, Steps), Policy(delay=3600), threading.Event()

    async def run(pool):
        set_rollout_executor(pool)
        if busy:  # it has not begun
            pool.submit(release.wait)
        task = asyncio.ensure_future(run_group(builder, policy))
        await asyncio.sleep(0.01)
        while not (busy or policy.asked):
            await asyncio.sleep(0.01)
        task.cancel()
        try:
            await task
        finally:
            release.set()

    # The pool waits for its thread.
    with ThreadPoolExecutor(1) as pool, pytest.raises(asyncio.CancelledError):
        asyncio.run(run(pool))
    assert builder.cleaned == (0 if busy else 1)
