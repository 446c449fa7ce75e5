"""Training and sampling divide a GPU's memory; what ran out once is used again when it is free."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch
from pretended_device import DEVICE, PretendedDevice

from tinker_cookbook.engine.memory import KnownLimits, MemoryBudget
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.engine.training import run as training_run
from tinker_cookbook.engine.training.micro_batch import MicroBatchPass
from tinker_cookbook.engine.training.run import TrainingRun


@pytest.fixture
def stories_limits(stories_base):
    stories_base.limits = KnownLimits()
    yield stories_base.limits
    stories_base.limits = KnownLimits()


def test_training_and_kv_caches_fit_side_by_side(tmp_path):
    """Whichever is there first, and while sequences hold the memory that the sampler was given.

    Four seconds: twelve requests until the memory is full."""
    folder = ref.make_model("qwen3", tmp_path)
    with PretendedDevice(total_bytes=4 << 20) as device:
        base = ref.load_base(folder, torch.float32, DEVICE)
        memory, free = MemoryBudget(DEVICE), device.free_bytes()
        training = memory.training_bytes()
        scheduler = Scheduler(base, base.kv_shapes or [], memory)
        cache = scheduler._cache
        sampling = scheduler._budget * cache.bytes_per_token
        assert training > 0.4 * free
        assert sampling > 0.3 * free
        assert training + sampling <= 0.95 * free
        # Long samples until the memory of the sampler is full.
        for number in range(12):
            settings = SamplingSettings(max_tokens=70, seed=number)
            scheduler.add(sample_request(Sampler(base, None), [5, 6, 7], 4, settings))
        most = 0
        while scheduler.busy:
            scheduler.step()
            most = max(most, cache.nbytes)
            assert memory.training_bytes() <= device.free_bytes()
        assert 0.5 * sampling < most <= sampling * 1.3  # pools grow by a quarter
        second = Scheduler(base, base.kv_shapes or [], memory)
        held = cache.nbytes
        assert held > 0  # prefixes are kept
        assert second._budget * cache.bytes_per_token <= sampling - held + 64 * 1024


def test_a_sequence_longer_than_the_sampler_s_memory_runs_alone(tmp_path):
    folder = ref.make_model("llama", tmp_path)
    with PretendedDevice(total_bytes=1 << 20) as device:
        base = ref.load_base(folder, torch.float32, DEVICE)
        device.total_bytes = device.allocated_bytes() + (64 << 10)
        scheduler = Scheduler(base, base.kv_shapes or [])
        assert scheduler._budget < base.context_length
        requests = [
            sample_request(Sampler(base, None), np.arange(3, 93), 1, SamplingSettings(max_tokens=8))
            for _ in range(2)
        ]
        for request in requests:
            scheduler.add(request)
        while scheduler.busy:
            scheduler.step()
            assert len(scheduler._rows) <= 1
        for request in requests:
            assert len(request.future.result(timeout=0)[0].tokens) == 8


def test_a_budget_that_was_too_much_grows_with_the_free_memory(
    stories_base, stories_limits, monkeypatch
):
    original, seen, free = MicroBatchPass.run, [], [1000]

    def short_of_memory(self, *args, **kwargs):
        seen.append(len(self._examples))
        if len(self._examples) > 1 and free[0] < 2000:
            raise torch.OutOfMemoryError("out of memory")
        original(self, *args, **kwargs)

    monkeypatch.setattr(MicroBatchPass, "run", short_of_memory)
    monkeypatch.setattr(training_run, "free_memory_bytes", lambda _: free[0])
    adapter = ref.random_adapter(stories_base)
    run = TrainingRun(
        "run",
        stories_base,
        adapter,
        10_000,
        measure=lambda: stories_limits.budget(10_000, lambda: free[0]),
    )
    data = ref.supervised(np.random.default_rng(0), stories_base, (20, 20))
    for _ in range(2):
        run.forward_backward(data, "cross_entropy")
    assert seen == [2, 1, 1, 1, 1]  # the failure is not repeated
    free[0] = 1100  # what else is in use differs a little from pass to pass
    run.forward_backward(data, "cross_entropy")
    assert seen[5:] == [1, 1]
    free[0] = 5000
    run.forward_backward(data, "cross_entropy")
    assert seen[7:] == [2]
    assert run.token_budget == stories_limits.budget(10_000, lambda: 5000) == 100
