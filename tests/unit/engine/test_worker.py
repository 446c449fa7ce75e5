"""The engine's thread: order of operations, turns of sampling, and how it ends."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.worker import Worker
from tinker_cookbook.exceptions import ConfigurationError

SECONDS = 20


class Batch:
    """Something to sample: so many steps, and when they were taken by a clock of its own."""

    def __init__(self) -> None:
        self.steps, self.now = 0, 0
        self.taken: list[int] = []
        self.ended = False

    def step(self) -> bool:
        if not self.steps:
            return False
        self.steps -= 1
        self.now += 5
        self.taken.append(self.now)
        return True

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def batch():
    return Batch()


@pytest.fixture
def worker(batch):
    made = Worker(lambda: None, batch.step, batch.end)
    yield made
    made.close()


def test_lanes_are_round_robin_and_fifo(worker):
    seen, go_on = [], threading.Event()
    worker.submit(go_on.wait)
    for lane, count in (("a", 4), ("b", 2), ("c", 1)):
        for i in range(count):
            worker.submit(lambda name=f"{lane}{i}": seen.append(name), lane)
    go_on.set()
    worker.finish_operations()
    assert seen == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_an_error_is_the_callers_and_the_next_operation_runs(worker):
    failed = worker.submit(lambda: 1 / 0)
    assert worker.submit(lambda: 7).result(SECONDS) == 7
    with pytest.raises(ZeroDivisionError):
        failed.result(0)


def test_sampling_and_a_long_operation_take_turns(worker, batch, monkeypatch):
    """The operation pauses between its parts; about half of the time goes to sampling."""
    clock = SimpleNamespace(monotonic=lambda: batch.now)
    monkeypatch.setattr("tinker_cookbook.engine.worker.time", clock)
    batch.steps = 1000
    spans = []

    def train() -> None:
        for _ in range(6):
            spans.append((batch.now, batch.now + 40))
            batch.now += 40
            worker.pause()

    worker.wake()
    worker.submit(train).result(SECONDS)
    inside = [t for t in batch.taken if spans[0][1] < t <= spans[-1][0]]
    assert not any(start < t < end for t in inside for start, end in spans)
    assert len(inside) == 40  # in 5 gaps of 40 ms, 5 ms a step
    worker.submit(lambda: None).result(SECONDS)  # a short operation waits for a step at the most


def test_closing_drops_what_is_queued(batch):
    worker = Worker(lambda: None, batch.step, batch.end)
    begun, go_on = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        go_on.wait(SECONDS)
        return "done"

    running, queued = worker.submit(first), worker.submit(lambda: None)
    begun.wait(SECONDS)
    worker.close(wait=False)
    with pytest.raises(CancelledError):
        queued.result(SECONDS)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        worker.submit(lambda: None)
    go_on.set()
    assert running.result(SECONDS) == "done"
    worker.close()
    assert batch.ended


def test_the_end_of_a_script_waits_for_its_operations(tmp_path):
    """A script that ends right after it asked for a checkpoint gets it."""
    code = f"""
import time, pathlib
from tinker_cookbook.engine.worker import Worker
from tinker_cookbook.exceptions import ConfigurationError
worker = Worker(lambda: None, lambda: False, lambda: None)
worker.submit(lambda: (time.sleep(0.3), pathlib.Path({str(tmp_path / "out")!r}).write_text("x")))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert (tmp_path / "out").read_text() == "x"


@pytest.fixture
def engine(stories_base, tmp_path):
    made = Engine("cpu", "float32")
    made._models[stories_base.folder] = stories_base
    yield made
    made.close()


def test_samples_arrive_while_another_run_trains(engine, stories_base):
    import engine_reference as ref

    run = ref.make_run(stories_base, budget=64)
    run._pause = engine.pause
    data = ref.supervised(np.random.default_rng(0), stories_base, (60,) * 16)
    sampler = Sampler(stories_base, None)
    training = engine.submit(run.forward_backward, data, "cross_entropy")
    sampled = engine.sample(
        sample_request(sampler, [1], 4, SamplingSettings(max_tokens=10, seed=0))
    )
    samples = sampled.result(60)
    assert not training.done()
    training.result(120)
    engine.submit(run.optim_step, AdamSettings(1e-3)).result(SECONDS)
    again = engine.sample(
        sample_request(sampler, [1], 4, SamplingSettings(max_tokens=10, seed=0))
    ).result(SECONDS)
    assert [s.tokens for s in again] == [s.tokens for s in samples]


def test_thread_survives_a_sampling_error(engine, stories_base, monkeypatch):
    """Memory that is too short even to take a request in, say."""
    sampler = Sampler(stories_base, None)
    ask = lambda: engine.sample(sample_request(sampler, [5], 2, SamplingSettings(max_tokens=2)))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_free_tokens", lambda self: [][1])
        with pytest.raises(IndexError):
            ask().result(10)
    assert len(ask().result(10)) == 2


def test_an_operation_waits_for_one_step_of_sampling_at_most(engine, stories_base):
    """Counted in steps: of 1,500 samples that were queued before, a few are running."""
    sampler = Sampler(stories_base, None)
    long = SamplingSettings(max_tokens=200, seed=0)
    samples = [engine.sample(sample_request(sampler, [1, 5], 300, long)) for _ in range(5)]
    steps, forward = [], stories_base.hidden_of_batch

    def counting(*args):
        steps.append(1)
        return forward(*args)

    stories_base.hidden_of_batch = counting
    try:
        while len(steps) < 3:
            time.sleep(0.01)
        waits = []
        for _ in range(4):  # as creating a run, a pass, a step and a save, each after the other
            before = len(steps)
            waits.append(engine.submit(lambda: len(steps)).result(SECONDS) - before)
        assert max(waits) <= 2
        assert not any(future.done() for future in samples)
    finally:
        for future in samples:
            future.cancel()
        del stories_base.hidden_of_batch


def test_training_in_float16_is_refused(engine):
    engine.require_trainable()
    engine.choice = dataclasses.replace(engine.choice, dtype=torch.float16)
    with pytest.raises(ConfigurationError, match=r"float16.*loss scaling.*set dtype=bfloat16"):
        engine.require_trainable()


def test_a_script_may_end_while_samples_are_drawn():
    """Without the wait at exit torch aborts the process (SIGABRT) in most tries."""
    code = """
import torch
from tinker_cookbook.engine.worker import Worker
size = torch.randn(1500, 1500)
worker = Worker(lambda: None, lambda: bool((size @ size).numel()), lambda: None)
worker.wake()
worker.submit(lambda: None).result()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
