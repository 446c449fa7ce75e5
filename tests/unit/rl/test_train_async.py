"""Asynchronous training: what may be started, what is trained, and in which order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from animal_stories import StoryDataset, story_config

from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.loop.async_source import (
    AsyncSource,
    ProblemQueue,
    QueueState,
    read_queue,
    write_queue,
)
from tinker_cookbook.rl.loop.sources import PolicySnapshot, RolloutGroup, RolloutWorker
from tinker_cookbook.rl.train import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.rl.types import TrajectoryGroup

NO_CLIENT: Any = None


def weights(step: int) -> PolicySnapshot:
    return PolicySnapshot(NO_CLIENT, step)


class FakeWorker(RolloutWorker):
    """Worker without a model: ``seconds(problem)`` is the duration; ``None`` fails."""

    def __init__(self, config, seconds=lambda problem: 0.0) -> None:
        super().__init__(config)
        self.seconds_of, self.started = seconds, []
        self.most_at_once = self._now = 0

    async def run_group(self, problem, snapshot):
        self.started.append((problem.position, snapshot.step))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            seconds = self.seconds_of(problem)
            await asyncio.sleep(seconds or 0.0)
        finally:
            self._now -= 1
        if seconds is None:
            return None
        group = TrajectoryGroup([], [], [], sampling_client_step=snapshot.step)
        return RolloutGroup(problem.batch, problem.index, result=group)


def make_source(tmp_path, worker, config, total_steps=5, start_step=0) -> AsyncSource:
    dataset = StoryDataset(config.dataset_builder)
    return AsyncSource(dataset, worker, config, total_steps, tmp_path, start_step)


def async_config(tmp_path, k=1, groups=2, data=None, stale_groups=None, **settings):
    return story_config(
        "no-such-model",
        tmp_path,
        data,
        async_config=AsyncConfig(
            max_steps_off_policy=k, groups_per_batch=groups, stale_groups=stale_groups
        ),
        **settings,
    )


async def run_steps(source, steps, seconds_of_training=0.0, start=0):
    """Goes through iterations; gives what each trained."""
    found = []

    async def consume(groups):
        await asyncio.sleep(seconds_of_training)

    for step in range(start, start + steps):
        collected = await source.collect(step, weights(step), consume)
        source.update_weights(weights(step + 1))
        found.append(collected)
    return found


def places(collected) -> list[tuple[int, int]]:
    return [(group.batch, group.index) for group in collected.groups]


@pytest.mark.parametrize("stale_groups", ["discard", "train"])
def test_max_steps_off_policy_bounds_staleness(tmp_path, stale_groups):
    config = async_config(tmp_path, k=2, groups=4, stale_groups=stale_groups)
    worker = FakeWorker(config, lambda problem: 0.001 * ((problem.batch * 7 + problem.index) % 9))

    async def go():
        async with make_source(tmp_path, worker, config, 12) as source:
            return await run_steps(source, 12, 0.003)

    found = asyncio.run(go())
    lags = [step - g.sampling_step for step, one in enumerate(found) for g in one.groups]
    assert len(lags) == 48
    assert min(lags) >= 0
    assert max(lags) > 0  # sampling did go on while training
    assert worker.most_at_once <= 4 * 3
    everything = [place for one in found for place in places(one)]
    assert len(set(everything)) == len(everything)
    if stale_groups == "train":
        assert sorted(everything) == sorted(place for place, _ in worker.started)
    else:
        assert max(lags) <= 2


@pytest.mark.parametrize("stale_groups", [None, "discard", "train"])
def test_a_slow_group_is_discarded_or_trained_when_it_is_done(tmp_path, stale_groups):
    config = async_config(tmp_path, k=1, groups=2, stale_groups=stale_groups)
    slow, release = (0, 1), asyncio.Event()

    class Held(FakeWorker):
        async def run_group(self, problem, snapshot):
            if problem.position == slow:
                await release.wait()
            return await super().run_group(problem, snapshot)

    worker = Held(config)

    async def go():
        async with make_source(tmp_path, worker, config, 6) as source:
            before = await run_steps(source, 3)
            release.set()
            return before + await run_steps(source, 3, start=3)

    found = asyncio.run(go())
    trained_at = [step for step, one in enumerate(found) if slow in places(one)]
    ages = [step - g.sampling_step for step, one in enumerate(found) for g in one.groups]
    discarded = sum(one.metrics["async/groups_discarded"] for one in found)
    assert len(ages) == 12
    if stale_groups == "train":
        assert (len(trained_at), discarded) == (1, 0)
        assert trained_at[0] >= 3  # more than k updates after it was started
    else:
        assert (trained_at, discarded) == ([], 1)
        assert max(ages) <= 1
    trained = {place for one in found for place in places(one)}
    assert {place for place, _ in worker.started} - trained == ({slow} if discarded else set())


def test_a_group_that_is_too_old_when_it_is_done_is_replaced(tmp_path):
    stream = StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)
    config = async_config(tmp_path, k=0, groups=2, stream_minibatch_config=stream)
    release = asyncio.Event()

    class Held(FakeWorker):
        async def run_group(self, problem, snapshot):
            if problem.position == (0, 1):
                await release.wait()
            return await super().run_group(problem, snapshot)

    async def go():
        async with make_source(tmp_path, Held(config), config, 9) as source:
            source.update_weights(weights(0))
            while not source.finished():
                await asyncio.sleep(0.001)

            async def consume(groups):
                # The old group is done while the first part trains, when no other may start.
                release.set()
                await asyncio.sleep(0.01)

            return await asyncio.wait_for(source.collect(5, weights(5), consume), 300)

    found = asyncio.run(go())
    assert [group.sampling_step for group in found.groups] == [5, 5]
    assert found.metrics["async/groups_discarded"] == 2


def test_zero_off_policy_steps_is_on_policy(tmp_path):
    config = async_config(tmp_path, k=0, groups=3)
    worker = FakeWorker(config)

    async def go():
        async with make_source(tmp_path, worker, config, 4) as source:
            return await run_steps(source, 4, 0.002)

    found = asyncio.run(go())
    assert [{g.sampling_step for g in one.groups} for one in found] == [{0}, {1}, {2}, {3}]
    assert len(worker.started) == 12


def test_an_error_of_an_environment_reaches_the_loop(tmp_path):
    config = async_config(tmp_path)

    class Broken(FakeWorker):
        async def run_group(self, problem, snapshot):
            if problem.position == (1, 0):
                raise OSError("the judge is away")
            return await super().run_group(problem, snapshot)

    async def go():
        async with make_source(tmp_path, Broken(config), config) as source:
            await run_steps(source, 5)

    with pytest.raises(OSError, match="the judge is away"):
        asyncio.run(go())


def test_run_ends_if_all_groups_fail(tmp_path):
    config = async_config(tmp_path)

    async def go():
        async with make_source(tmp_path, FakeWorker(config, lambda _: None), config) as source:
            await run_steps(source, 1)

    with pytest.raises(AllTrajectoriesFailedError, match="groups failed"):
        asyncio.run(go())


def test_groups_that_fail_are_counted_and_made_up_for(tmp_path):
    config = async_config(tmp_path, groups=4)
    worker = FakeWorker(config, lambda problem: None if problem.index == 1 else 0.0)

    async def go():
        async with make_source(tmp_path, worker, config) as source:
            return await run_steps(source, 3)

    found = asyncio.run(go())
    assert [len(one.groups) for one in found] == [4, 4, 4]
    assert sum(one.num_failed for one in found) >= 3


def test_the_problem_queue_goes_on_where_it_was(tmp_path):
    config = async_config(tmp_path, data={"num_batches": 3, "groups_per_batch": 4})
    dataset = StoryDataset(config.dataset_builder)

    async def take(queue, count):
        return [(await queue.next()).position for _ in range(count)]

    async def go():
        whole = ProblemQueue(dataset, 0)
        first = await take(whole, 30)
        assert first == [(batch, index) for batch in range(8) for index in range(4)][:30]
        again = [(1, 2), (2, 3)]
        resumed = ProblemQueue(dataset, 0, (4, 1), again)
        assert await take(resumed, 1) == [(1, 2)]
        # Not given yet, so a second kill must not lose it; and the place has not moved.
        assert (resumed.again, resumed.position) == ({(2, 3)}, (4, 1))
        assert await take(resumed, 4) == [(2, 3), (4, 1), (4, 2), (4, 3)]
        assert (resumed.again, resumed.position) == (set(), (4, 4))
        whole.close()
        resumed.close()

    asyncio.run(go())


def test_kill_and_resume_trains_each_group_once(tmp_path):
    """Queue, groups in flight and place in the data as they were after update 3."""
    config = async_config(tmp_path, k=2, groups=3)
    slow = FakeWorker(config, lambda problem: 0.002 * (problem.index + 1))

    async def killed():
        async with make_source(tmp_path, slow, config, 8) as source:
            found = await run_steps(source, 3, 0.004)
            source.save(tmp_path, 3)
            return [place for one in found for place in places(one)]

    async def resumed():
        worker = FakeWorker(config)
        async with make_source(tmp_path, worker, config, 8, start_step=3) as source:
            found = await run_steps(source, 5, 0.001, start=3)
            return [place for one in found for place in places(one)]

    before, after = asyncio.run(killed()), asyncio.run(resumed())
    assert len(before) == 9
    assert len(after) == 15
    assert not set(before) & set(after)
    # Every problem up to the last one trained, without a gap.
    everything = sorted(before + after)
    assert everything[:20] == [(batch, index) for batch in range(6) for index in range(4)][:20]


def test_second_kill_loses_nothing(tmp_path):
    config = async_config(tmp_path, k=2, groups=3)
    begun = [(0, 1), (0, 3), (1, 0)]
    write_queue(tmp_path, 1, QueueState((1, 2), begun, []))

    async def go():
        async with make_source(tmp_path, FakeWorker(config), config, start_step=1) as source:
            source.save(tmp_path, 2)

    asyncio.run(go())
    state = read_queue(tmp_path, 2)
    assert state is not None
    assert (state.position, list(state.in_flight)) == ((1, 2), begun)


@pytest.mark.parametrize("loss_fn", ["stable_reinforce", "ppo"])
def test_an_asynchronous_run_end_to_end(stories_model, tmp_path, capsys, loss_fn):
    config = story_config(
        stories_model,
        tmp_path,
        {"num_batches": 6, "groups_per_batch": 3, "reward_for": "length", "test_groups": 2},
        async_config=AsyncConfig(max_steps_off_policy=1, groups_per_batch=3, loss_fn=loss_fn),
        eval_every=2,
        save_every=2,
    )
    asyncio.run(train.main(config))
    told = capsys.readouterr().out.count("not published")
    assert told == (loss_fn == "stable_reinforce")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [row["step"] for row in found] == list(range(7))
    for row in found[1:]:
        assert 0 <= row["async/staleness_min"] <= row["async/staleness_max"]
        assert row["env/all/total_episodes"] == 12
        assert row["training_client/step"] == row["step"] - 1
        assert row["sampling_client/step_mean"] == pytest.approx(
            row["step"] - 1 - row["async/staleness_mean"]
        )
    saved = sorted(path.name for path in Path(tmp_path).glob("async_queue_*.jsonl"))
    assert saved == [f"async_queue_{step:06d}.jsonl" for step in (2, 4, 6)]
