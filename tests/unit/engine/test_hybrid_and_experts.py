"""Models whose layers keep a state, and models of experts: what works, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.sampling.fallback_sampler import FallbackSampler
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import ConfigurationError, TrainingError

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


def _config(kind: str):
    import transformers as tf

    shape = {**ref.SHAPE, "head_dim": 16}
    if kind == "qwen3_next":
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 0}
        return tf.Qwen3NextConfig(**{**shape, **linear, "num_hidden_layers": 4})
    if kind == "qwen3_moe":
        return tf.Qwen3MoeConfig(**shape, **EXPERTS, num_experts=4)
    return tf.DeepseekV3Config(
        **{**ref.SHAPE, "num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], BaseModel]:
    known: dict[str, BaseModel] = {}

    def get(kind: str) -> BaseModel:
        if kind not in known:
            import transformers as tf

            torch.manual_seed(3)
            model = tf.AutoModelForCausalLM.from_config(_config(kind))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() >= 2:
                        parameter.normal_(0, 0.1)
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder)
            known[kind] = ref.load_base(folder)
        return known[kind]

    return get


def _sample(*requests) -> None:
    sampling = FallbackSampler()
    for request in requests:
        sampling.add(request)
    while sampling.busy:
        sampling.step()


def _request(sampler: Sampler, count: int, seed: int = 9, **kwargs):
    settings = SamplingSettings(**{"max_tokens": 8, "seed": seed, **kwargs})
    return sample_request(sampler, np.arange(5, 20), count, settings)


def test_a_hybrid_model_draws_several_samples_as_each_alone(made):
    base = made("qwen3_next")
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


def test_a_hybrid_model_serves_its_owners_in_turn(made):
    base = made("qwen3_next")
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
    sampling.add(bad)
    while sampling.busy:
        sampling.step()
    with pytest.raises(TrainingError, match="the weights of run 3 give"):
        bad.future.result(timeout=0)
    assert all(len(request.future.result(timeout=0)[0].tokens) == 8 for request in (*much, little))


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_routed_experts_are_not_left_out_silently(made, kind):
    base = made(kind)
    with pytest.raises(ConfigurationError, match=r"routed experts .*experts.*set train_mlp=false"):
        base.require_covered(AdapterSpec(4))
    base.require_covered(AdapterSpec(4, train_mlp=False))
    made("qwen3_next").require_covered(AdapterSpec(4))
