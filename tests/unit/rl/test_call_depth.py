"""Number of Python frames and files between the RL loop and the user's ``Env.step``. 3 seconds."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
from rollout_samples import Group, Steps

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.loop.async_source import AsyncSource
from tinker_cookbook.rl.loop.iteration import Loop
from tinker_cookbook.rl.loop.sources import (
    BatchSource,
    GroupSource,
    RolloutWorker,
    SnapshotPolicy,
    problem_batches,
)
from tinker_cookbook.rl.train import AsyncConfig
from tinker_cookbook.rl.types import RLDataset

PACKAGE = str(Path(inspect.getfile(GroupSource)).parents[2])


def package_frames(frame: FrameType | None) -> list[tuple[str, str]]:
    """Returns (file, function) of the frames of the package, the outermost first."""
    frames = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            frames.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


def record_creators(loop: asyncio.AbstractEventLoop) -> dict[asyncio.Task, list[tuple[str, str]]]:
    """Records for each new task the frames that lead to its creation, across tasks."""
    creators: dict[asyncio.Task, list[tuple[str, str]]] = {}

    def make_task(loop, coroutine, **options):
        parent = asyncio.current_task(loop)
        task = asyncio.Task(coroutine, loop=loop, **options)
        creators[task] = creators.get(parent, []) + package_frames(inspect.currentframe())
        return task

    loop.set_task_factory(make_task)
    return creators


class Recorder(Steps):
    """Environment that records the frames between the loop and its ``step``."""

    creators: dict[asyncio.Task, list[tuple[str, str]]]
    seen: list[list[tuple[str, str]]]

    async def step(self, action, *, extra=None):
        task = asyncio.current_task()
        assert task is not None
        own = package_frames(inspect.currentframe())
        type(self).seen.append(self.creators.get(task, []) + own)
        return await super().step(action, extra=extra)


class Problems(RLDataset):
    def get_batch(self, index):
        return [Group(Recorder, Recorder), Group(Recorder)]

    def __len__(self):
        return 2


class NoTraining:
    """Stands in for the session, the reporter and the update of an iteration."""

    client, start_step, evaluators = None, 0, ()

    async def sampling_client(self, **_):
        return None

    async def record_start(self):
        pass

    def keep(self, *_):
        pass


@pytest.mark.parametrize("asynchronous", [False, True])
def test_at_most_ten_frames_in_five_files_lead_from_the_loop_to_a_step(
    asynchronous, tmp_path, monkeypatch
):
    config = Config(
        model_name="none",
        recipe_name="depth",
        log_path=str(tmp_path),
        max_tokens=4,
        learning_rate=1e-4,
        async_config=AsyncConfig(max_steps_off_policy=0, groups_per_batch=2)
        if asynchronous
        else None,
    )

    async def sample_many(self, model_input, stop, num_samples, *, max_tokens=None):
        return [TokensWithLogprobs([5], [-0.5])] * num_samples

    monkeypatch.setattr(SnapshotPolicy, "sample_many", sample_many)

    async def finish():
        raise asyncio.CancelledError  # everything has been sampled

    monkeypatch.setattr(
        "tinker_cookbook.rl.loop.iteration.Update",
        lambda *_: SimpleNamespace(add=lambda groups: asyncio.sleep(0), finish=finish),
    )

    async def run():
        Recorder.creators = record_creators(asyncio.get_running_loop())
        Recorder.seen = []
        worker = RolloutWorker(config)
        source: GroupSource
        if asynchronous:
            source = AsyncSource(Problems(), worker, config, 1, tmp_path)
        else:
            source = BatchSource(problem_batches(Problems(), 0, 0, 1), worker)
        loop = Loop(config, NoTraining(), source, NoTraining(), None)  # type: ignore[arg-type]
        async with source:
            with pytest.raises(asyncio.CancelledError):
                await loop.run(1)

    asyncio.run(run())
    assert len(Recorder.seen) == 3
    for frames in Recorder.seen:
        # In an asynchronous run a background task starts the groups.
        first = "_feed" if asynchronous else "_iteration"
        chain = frames[[name for _, name in frames].index(first) :]
        assert chain[-1][0] == "episode.py"
        assert len(chain) <= 10, chain
        assert len({file for file, _ in chain}) <= 5, chain
