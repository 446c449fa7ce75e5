"""Models whose layers keep a state, and models of experts: what works, and what is refused."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest

from tinker_cookbook.engine.model import base_model
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.sampling.fallback_sampler import FallbackSampler
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import ConfigurationError, TrainingError


def _sample(*requests) -> None:
    sampling = FallbackSampler()
    ref.finish(sampling, *requests)


def _request(sampler: Sampler, count: int, seed: int = 9, **kwargs):
    settings = SamplingSettings(**{"max_tokens": 8, "seed": seed, **kwargs})
    return sample_request(sampler, np.arange(5, 20), count, settings)


def test_a_hybrid_model_draws_several_samples_as_each_alone(tiny_base):
    base = tiny_base("qwen3_next")
    assert base.kv_shapes is None
    sampler = Sampler(base, ref.random_adapter(base))
    together = _request(sampler, 4, stop_tokens=frozenset(range(3, 80)))  # they end one by one
    _sample(together)
    found = together.future.result(timeout=0)
    assert len({len(sample.tokens) for sample in found}) > 1
    for row, sample in enumerate(found):
        alone = _request(sampler, 1, stop_tokens=together.settings.stop_tokens)
        alone.rows[0].index = row
        alone.rows[0]._rng = np.random.default_rng([9, row])
        _sample(alone)
        assert alone.future.result(timeout=0)[0].tokens == sample.tokens
        logprobs = alone.future.result()[0].logprobs
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-4)


def test_a_hybrid_model_serves_its_owners_in_turn(tiny_base):
    base = tiny_base("qwen3_next")
    ann, bob = (Sampler(base, None, owner=owner) for owner in ("ann", "bob"))
    much = [_request(ann, 1, seed) for seed in range(20)]
    sampling = FallbackSampler()
    for request in much:
        sampling.add(request)
    sampling.step()
    little = _request(bob, 1)
    sampling.add(little)
    sampling.step()
    assert len(little.rows[0].sample.tokens) == 1
    broken = Sampler(base, ref.random_adapter(base), "run 3")
    next(iter(broken._adapter.tensors.values()))[1].fill_(float("nan"))
    bad = _request(broken, 2)
    ref.finish(sampling, bad)
    with pytest.raises(TrainingError, match="the weights of run 3 give"):
        bad.future.result(timeout=0)
    assert all(len(request.future.result(timeout=0)[0].tokens) == 8 for request in (*much, little))


def test_experts_of_an_unknown_kind_are_not_left_out_silently(tmp_path, monkeypatch):
    monkeypatch.setattr(base_model, "stacked_experts", lambda _: [])
    base = ref.load_base(ref.make_model("qwen3_moe", tmp_path))
    with pytest.raises(ConfigurationError, match=r"routed experts .*experts.*set train_mlp=false"):
        base.require_covered(AdapterSpec(4))
    base.require_covered(AdapterSpec(4, train_mlp=False))
