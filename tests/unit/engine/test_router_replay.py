"""The sampler's choices of experts, replayed in training."""

from __future__ import annotations

from pathlib import Path

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.extensions import router_replay
from tinker_cookbook.engine.kernels.cpu import linear
from tinker_cookbook.engine.memory import BoundedCache
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler
from tinker_cookbook.exceptions import ConfigurationError

NAMES = ("replayed", "own")


def _base(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> BaseModel:
    path = ref.make_model(kind, folder)
    return BaseModel(str(path), path, ref.CPU, dtype, replay_router=True)


def _items(prompts: list[np.ndarray], samples: list) -> list:
    texts = [np.concatenate([p, s.tokens]) for p, s in zip(prompts, samples, strict=True)]
    return [ref.example(text, weights=np.ones(len(text) - 1)) for text in texts]


def _other_experts(base: BaseModel, run, data: list, *, replay: bool) -> float:
    """Returns the share of (token, layer) for which training takes other experts than sampling."""
    known, shares = base.replay._known, []
    _ = base.packs_rows, base.shared_layout  # their trials run the layers too
    for item in data:
        sampled = known.get(router_replay._key(item.tokens))
        if not replay:
            base.replay._known = BoundedCache(0)
        with base._active.use(recorded=(chosen := [])):
            run.forward_backward([item], "cross_entropy", backward=False)
        base.replay._known = known
        trained = torch.cat(chosen, 1).numpy()[: len(item.tokens)]  # the rest is padding
        both = (np.sort(one.reshape(-1, base.replay._k)) for one in (sampled, trained))
        shares.append((next(both) != next(both)).any(-1))
    return np.concatenate(shares).mean()


def _samples(base: BaseModel, run, count: int = 4, max_tokens: int = 12) -> tuple[list, list]:
    """Of two prompts, one of which continues an answer to the other, as a second turn does."""
    sampler, settings = (
        Sampler(base, run.snapshot()),
        SamplingSettings(max_tokens=max_tokens, seed=2),
    )
    first = np.arange(5, 105)
    samples = ref.draw(sampler, first, count, settings)
    second = np.concatenate([first, samples[0].tokens, [7, 8, 9]])
    requests = [sample_request(sampler, prompt, count, settings) for prompt in (second, first)]
    ref.run_batch(base, requests)
    prompts = [second] * count + [first] * count
    return prompts, [sample for request in requests for sample in request.future.result(0)]


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", *(pytest.param(k, marks=pytest.mark.slow) for k in ref.ROUTED[1:])]
)
def test_bf16_gap_between_sampler_and_trainer_shrinks(kind, tmp_path, record_property, monkeypatch):
    """5 s: what is left is rounding; without replay some tokens have other experts."""
    # Packed matrices round alike for any number of rows, so too few experts would differ.
    monkeypatch.setattr(linear, "SMALLEST", 1 << 16)
    base = _base(kind, tmp_path, torch.bfloat16)
    run = ref.make_run(base, size=0.005)
    prompts, samples = _samples(base, run, count=16, max_tokens=20)
    data = _items(prompts, samples)
    gaps = {}
    other = {name: _other_experts(base, run, data, replay=name == "replayed") for name in NAMES}
    record_property("other_experts", str(other))
    assert other["replayed"] == 0 < other["own"]
    for name in NAMES:
        output = run.forward_backward(data, "cross_entropy", backward=False)
        count = sum(len(item.tokens) for item in data)
        assert output.metrics["router_replayed_tokens:sum"] == (count if name == "replayed" else 0)
        off = [
            lp[len(p) - 1 :] - np.array(s.logprobs)
            for p, s, lp in zip(prompts, samples, output.logprobs, strict=True)
        ]
        gaps[name] = np.abs(np.concatenate(off))
        base.replay._known = BoundedCache(0)
    report = {n: f"mean {g.mean():.4f}, largest {g.max():.3f}" for n, g in gaps.items()}
    record_property("sampler_trainer_gap", str(report))
    assert gaps["replayed"].mean() < gaps["own"].mean()
    assert gaps["replayed"].max() < gaps["own"].max() / 2


def test_training_uses_the_kept_choices_and_gradients_flow_through_the_router(tmp_path):
    """3 s: against transformers with a router that is told which experts to take."""
    base = _base("qwen3_moe", tmp_path / "base")
    run = ref.make_run(base)
    rng = np.random.default_rng(0)
    data = ref.supervised(rng, base, (20, 11, 27))
    chosen = {}
    for item in data:
        # Other experts than the routers would take, each twice different.
        pairs = [rng.permutation(4)[:2] for _ in range(len(item.tokens) * 3)]
        chosen[item.tokens.tobytes()] = np.stack(pairs).reshape(len(item.tokens), 6)
        base.replay.keep(item.tokens, chosen[item.tokens.tobytes()].astype(np.int16))
    output = run.forward_backward(data, "cross_entropy")
    model = ref.peft_model(base, run.adapter, tmp_path / "adapter")
    expected = []
    for item in data:
        layers = model.get_base_model().model.layers
        for number, layer in enumerate(layers):
            mine = torch.from_numpy(chosen[item.tokens.tobytes()].reshape(-1, 3, 2)[:, number])

            def told(hidden, gate=layer.mlp.gate, mine=mine):
                logits = hidden @ gate.weight.t()
                weights = logits.softmax(-1).gather(1, mine)
                assert not gate.norm_topk_prob
                return logits, weights, mine

            layer.mlp.gate.forward = told
        expected.append(ref.reference_logprobs(model, item.tokens, item.targets))
    for found, wanted in zip(output.logprobs, expected, strict=True):
        np.testing.assert_allclose(found, wanted.detach().numpy(), atol=2e-5)
    gradients = ref.peft_gradients(model, ref.weighted(data)(expected))
    assert ref.relative_error(run._gradients, gradients) < 1e-4


def test_choices_survive_prefixes_of_a_cache_and_forget_the_oldest(tmp_path):
    base = _base("qwen3_moe", tmp_path)
    run = ref.make_run(base)
    prompts, samples = _samples(base, run, count=2)
    data = _items(prompts, samples)
    plain = ref.load_base(base.folder)
    for item in data:
        kept = base.replay._known.get(router_replay._key(item.tokens))
        terms = run.adapter.terms(torch.float32)
        with plain.adapted(terms), plain._active.use(recorded=(chosen := [])):
            plain.hidden(torch.from_numpy(item.tokens)[None])
        assert np.array_equal(kept, torch.cat(chosen, 1).numpy())
    base.replay._known._budget = 2000
    base.replay.keep(np.arange(3), np.zeros((3, 6), np.int16))
    kept = [size for _, size in base.replay._known._values.values()]
    assert base.replay._known._bytes == sum(kept) <= 2000


def test_models_without_experts_and_unknown_routers_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"replay_router=true, but .* no routed experts"):
        _base("llama", tmp_path / "dense")
    monkeypatch.setattr(
        router_replay._Chosen, "__torch_function__", lambda _, f, t, a, k=None: f(*a, **(k or {}))
    )
    with pytest.raises(ConfigurationError, match=r"routers of .* choose in a way"):
        _base("qwen3_moe", tmp_path / "moe")
