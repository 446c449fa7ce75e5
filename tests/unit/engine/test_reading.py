"""Prompts that begin alike and come at once: what they share is read once, and nothing changes."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest

from tinker_cookbook.engine.sampling import scheduler as batcher_module
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.engine.sampling.scheduler import Scheduler

SETTINGS = SamplingSettings(max_tokens=3, seed=1)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """So that the beginning takes several passes."""
    monkeypatch.setattr(batcher_module, "_STEP_TOKENS_CPU", 48)


def family(base, count: int, stem: int, own: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts of which all begin with the same ``stem`` tokens."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, base.vocab_size, stem)
    ends = (rng.integers(3, base.vocab_size, own) for _ in range(count))
    return [np.concatenate([common, end]) for end in ends]


def drawn(requests) -> list[tuple[list[int], list[float]]]:
    samples = [request.future.result(timeout=0)[0] for request in requests]
    return [(sample.tokens, sample.logprobs) for sample in samples]


def alone(base, prompts) -> list[tuple[list[int], list[float]]]:
    sampler = Sampler(base, None)
    found = []
    for prompt in prompts:
        request = sample_request(sampler, prompt, 1, SETTINGS)
        ref.run_batch(base, [request])
        found += drawn([request])
    return found


def test_common_prefix_is_prefilled_once(stories_base, monkeypatch):
    prompts = family(stories_base, 10, stem=100, own=7)
    expected = alone(stories_base, prompts)
    computed = ref.count_computed(stories_base, monkeypatch)
    sampler = Sampler(stories_base, None)
    requests = [sample_request(sampler, prompt, 1, SETTINGS) for prompt in prompts]
    ref.run_batch(stories_base, requests)
    assert sum(computed) == 100 + 10 * 7 + 10 * 2
    assert drawn(requests) == expected
    cached = [request.future.result()[0].cached_prompt_tokens for request in requests]
    assert cached == [0] + [100] * 9


def test_branches_reuse_the_longest_prefix(stories_base, monkeypatch):
    """A tree: two branches of one stem, with two prompts each."""
    stem = family(stories_base, 1, stem=80, own=0)[0]
    branches = [
        np.concatenate([stem, prompt])
        for seed in (1, 2)
        for prompt in family(stories_base, 2, stem=70, own=5, seed=seed)
    ]
    expected = alone(stories_base, branches)
    computed = ref.count_computed(stories_base, monkeypatch)
    sampler = Sampler(stories_base, None)
    requests = [sample_request(sampler, prompt, 1, SETTINGS) for prompt in branches]
    ref.run_batch(stories_base, requests)
    assert sum(computed) == 80 + 2 * 70 + 4 * 5 + 4 * 2
    assert drawn(requests) == expected


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_waiting_prefill_survives_cancellation(stories_base, steps):
    """Before, while and after the common beginning is read."""
    prompts = family(stories_base, 5, stem=100, own=7)
    expected = alone(stories_base, prompts)
    sampler = Sampler(stories_base, None)
    scheduler = Scheduler(stories_base, stories_base.kv_shapes)
    requests = [sample_request(sampler, prompt, 1, SETTINGS) for prompt in prompts]
    for request in requests:
        scheduler.add(request)
    for _ in range(steps):
        scheduler.step()
    requests[0].future.cancel()
    ref.finish(scheduler)
    assert drawn(requests[1:]) == expected[1:]


def test_preemption_changes_no_sample(stories_base, monkeypatch):
    """Some are let in later, others begin again."""
    prompts = family(stories_base, 6, stem=100, own=7)
    expected = alone(stories_base, prompts)
    monkeypatch.setattr(Scheduler, "_free_tokens", lambda self: 400)
    sampler = Sampler(stories_base, None)
    requests = [sample_request(sampler, prompt, 1, SETTINGS) for prompt in prompts]
    ref.run_batch(stories_base, requests)
    assert drawn(requests) == expected
