"""Who waits for a place in the batch gets it within two steps, and no sample changes by it."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest

from tinker_cookbook.engine.sampling import scheduler as batcher_module
from tinker_cookbook.engine.sampling.requests import SampleRequest, SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler


@pytest.fixture(params=["stories", "stories without native", "gemma3"])
def base(request, tiny_base, stories_base, monkeypatch):
    name, _, without = request.param.partition(" ")
    base = stories_base if name == "stories" else tiny_base(name)
    if without:
        ref.without_compiler(monkeypatch, base)
    return base


def ask(sampler, prompt, count: int, seed: int, owner: str | None, **kwargs) -> SampleRequest:
    """A request for a sampler of the same weights that belongs to ``owner``."""
    own = sampler
    if owner is not None:
        own = Sampler(sampler.base, sampler._adapter, owner=owner)
    settings = SamplingSettings(**{"max_tokens": 20, "seed": seed, **kwargs})
    return sample_request(own, prompt, count, settings)


def begun(request) -> int:
    return sum(bool(row.sample.tokens) for row in request.rows)


def assert_as_alone(request) -> None:
    alone = ref.draw(request.sampler, request.prompt, request.num_samples, request.settings)
    found = request.future.result(timeout=0)
    assert [sample.tokens for sample in found] == [sample.tokens for sample in alone]
    for sample, expected in zip(found, alone, strict=True):
        np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=1e-4)


def full_batcher(base, *requests) -> Scheduler:
    scheduler = Scheduler(base, base.kv_shapes)
    scheduler._usual_rows = 8
    for request in requests:
        scheduler.add(request)
    for _ in range(4):
        scheduler.step()
    return scheduler


def test_fair_scheduling_between_owners(base):
    sampler = Sampler(base, None)
    much = ask(sampler, np.arange(3, 24), 1024, 1, "ann", max_tokens=30)
    scheduler = full_batcher(base, much)
    drawn = {row.index: list(row.sample.tokens) for row in much.rows if row.sample.tokens}
    assert len(drawn) == 8
    little = ask(sampler, np.arange(5, 12), 3, 2, "bob")
    scheduler.add(little)
    scheduler.step()
    scheduler.step()
    assert begun(little) == 3
    while not little.future.done():
        scheduler.step()
        assert scheduler._running_rows()
        assert len(scheduler._running_rows()) <= 8
    assert_as_alone(little)
    while not all(len(much.rows[i].sample.tokens) == 30 for i in drawn):
        scheduler.step()
    for index, tokens in drawn.items():  # nothing that was drawn of them was drawn anew
        assert much.rows[index].sample.tokens[: len(tokens)] == tokens
    half = ask(sampler, np.arange(3, 24), 8, 1, None, max_tokens=30)
    finish_alone = Scheduler(base, base.kv_shapes)
    finish_alone.add(half)
    ref.finish(finish_alone)
    expected = half.future.result(timeout=0)
    for index in drawn:
        assert much.rows[index].sample.tokens == expected[index].tokens
        logprobs = much.rows[index].sample.logprobs
        np.testing.assert_allclose(logprobs, expected[index].logprobs, atol=1e-4)
    much.future.cancel()
    scheduler.step()
    assert not scheduler.busy


def test_interrupted_samples_equal_single(base):
    """Owners that come one after the other: places go from those with most to those with none."""
    samplers = [Sampler(base, None), Sampler(base, ref.random_adapter(base))]
    requests = [ask(samplers[0], np.arange(3, 24), 12, 1, "ann")]
    scheduler = full_batcher(base, *requests)
    for number, owner in enumerate(("bob", "cid", "dan")):
        prompt = np.arange(4 + number, 20)
        requests.append(ask(samplers[number % 2], prompt, 5, number, owner))
        scheduler.add(requests[-1])
        scheduler.step()
        scheduler.step()
        assert begun(requests[-1])
    ref.finish(scheduler)
    for request in requests:
        assert_as_alone(request)


def test_short_prompt_among_long_prefills(stories_base, monkeypatch):
    monkeypatch.setattr(batcher_module, "_STEP_TOKENS_CPU", 48)
    sampler, other = Sampler(stories_base, None), Sampler(stories_base, None)
    rng = np.random.default_rng(0)
    long = [ask(sampler, rng.integers(3, 500, 300), 1, i, "ann") for i in range(5)]
    scheduler = full_batcher(stories_base, *long)
    little = ask(other, [5, 6, 7], 1, 2, "bob")
    scheduler.add(little)
    scheduler.step()
    assert begun(little) == 1
    ref.finish(scheduler)
    for request in (*long, little):
        assert_as_alone(request)


def test_preemption_for_a_first_sample(base):
    sampler = Sampler(base, None)
    much = ask(sampler, np.arange(3, 24), 30, 1, "ann", max_tokens=60)
    scheduler = Scheduler(base, base.kv_shapes)
    scheduler.add(much)
    scheduler._budget = 800
    for _ in range(6):
        scheduler.step()
    little = ask(sampler, np.arange(3, 50), 4, 2, "bob")
    scheduler.add(little)
    scheduler.step()
    scheduler.step()
    assert begun(little) >= 1
    ref.finish(scheduler)
    assert_as_alone(little)
    assert_as_alone(much)
