"""What breaks one row, request or adapter fails alone: the others get the same bits as without."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler
from tinker_cookbook.exceptions import ConfigurationError, TrainingError

BASES = ("stories", "stories without native", "gemma3", "qwen3 without native")


@pytest.fixture(params=BASES)
def base(request, tiny_base, stories_base, monkeypatch):
    name, _, without = request.param.partition(" ")
    base = stories_base if name == "stories" else tiny_base(name)
    if without:
        ref.without_compiler(monkeypatch, base)
    return base


class World:
    """Requests of several owners with two adapters in one batch."""

    def __init__(self, base) -> None:
        self.base = base
        adapters = None, ref.random_adapter(base)
        self.samplers = [
            Sampler(base, adapter, owner=owner) for owner in ("ann", "bob") for adapter in adapters
        ]
        self.scheduler = Scheduler(base, base.kv_shapes)
        self.good = []
        for number in range(6):
            prompt = np.arange(3 + number, 24 + 3 * number)
            settings = SamplingSettings(max_tokens=12, seed=number)
            request = sample_request(self.samplers[number % 4], prompt, 2, settings)
            self.good.append(request)

    def run(self, *bad) -> None:
        """The bad requests come between the others, and once more after them."""
        for number, request in enumerate(self.good):
            self.scheduler.add(request)
            if number < len(bad):
                self.scheduler.add(bad[number])
            self.scheduler.step()
        for request in bad[len(self.good) :]:
            self.scheduler.add(request)
        while self.scheduler.busy:
            self.scheduler.step()

    def assert_the_others_are_as_alone(self) -> None:
        for request in self.good:
            alone = ref.draw(request.sampler, request.prompt, 2, request.settings)
            ref.assert_same_samples(request.future.result(timeout=0), alone)


def broken_adapter(base, value: float):
    adapter = ref.random_adapter(base)
    next(iter(adapter.tensors.values()))[1].fill_(value)
    return adapter


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_weights_fail_only_their_request(base, value):
    world = World(base)
    sampler = Sampler(base, broken_adapter(base, value), "run 7")
    settings = SamplingSettings(max_tokens=12, seed=1, temperature=0.7, top_p=0.9, top_k=5)
    bad = [sample_request(sampler, np.arange(3, 40), 3, settings) for _ in range(8)]
    world.run(*bad)
    for request in bad:
        with pytest.raises(TrainingError, match=r"the weights of run 7 give .* NaN"):
            request.future.result(timeout=0)
    # What they have left in memory must not reach those who come later either.
    world.good += [sample_request(world.samplers[0], np.arange(3, 30), 2, settings)]
    world.scheduler.add(world.good[-1])
    while world.scheduler.busy:
        world.scheduler.step()
    world.assert_the_others_are_as_alone()


def test_raising_adapter_fails_only_its_request(base, monkeypatch):
    world = World(base)
    sampler = Sampler(base, ref.random_adapter(base))

    def broken():
        raise KeyError("an injected error")

    monkeypatch.setattr(sampler, "terms", broken)
    settings = SamplingSettings(max_tokens=12, seed=1)
    bad = [sample_request(sampler, np.arange(3, 40), 3, settings) for _ in range(3)]
    world.run(*bad)
    for request in bad:
        with pytest.raises(KeyError, match="an injected error"):
            request.future.result(timeout=0)
    world.assert_the_others_are_as_alone()


def test_failing_row_fails_only_its_request(base, monkeypatch):
    """With the same adapter as others, once while its prompt is read, once while it decodes."""
    world = World(base)
    forward = base.hidden_of_batch
    settings = SamplingSettings(max_tokens=12, seed=1, temperature=0)
    bad = [sample_request(world.samplers[0], [290, 3 + i], 2, settings) for i in range(2)]
    cursed = {290}

    def breaks(tokens, positions, layout, segments):
        rows = zip(tokens.tolist(), positions.tolist(), strict=True)
        if any(token in cursed and position <= 2 for token, position in rows):
            raise IndexError("an injected error")
        return forward(tokens, positions, layout, segments)

    with monkeypatch.context() as patch:
        patch.setattr(base, "hidden_of_batch", breaks)
        world.run(*bad)
    for request in bad:
        with pytest.raises(IndexError, match="an injected error"):
            request.future.result(timeout=0)
    world.assert_the_others_are_as_alone()


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [1e-40, 1e-308, 1e-310])
def test_numbers_that_vanish_in_float32_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"{name}: got {value}, which float32 cannot hold"):
        SamplingSettings(**{name: value})


@pytest.mark.parametrize("value", [2e-38, 1e-30, 1e-9])
def test_tiny_temperature_is_greedy(stories_base, value):
    sampler = Sampler(stories_base, None)
    greedy, cold = (
        ref.draw(sampler, [1, 5], 1, SamplingSettings(max_tokens=9, temperature=t, seed=1))[0]
        for t in (0, value)
    )
    assert cold.tokens == greedy.tokens
    assert all(torch.isfinite(torch.tensor(cold.logprobs)))
