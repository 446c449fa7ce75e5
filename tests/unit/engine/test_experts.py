"""LoRA on routed experts: against peft's ``target_parameters``, in batches, and in files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import engine_reference as ref
import numpy as np
import pytest
import torch
from tinker import types

from tinker_cookbook.backends.local import LocalServiceClient
from tinker_cookbook.engine.checkpoints.store import CheckpointStore
from tinker_cookbook.engine.engine import Engine
from tinker_cookbook.engine.kernels import experts as kernels
from tinker_cookbook.engine.model.lora import Adapter, AdapterSpec
from tinker_cookbook.engine.sampling.requests import SamplingSettings, sample_request
from tinker_cookbook.engine.sampling.sampler import Sampler

EVERY = pytest.mark.parametrize("kind", ref.ROUTED)
MLP = AdapterSpec(rank=4, train_attn=False, train_unembed=False)


SLOW = pytest.mark.slow


@pytest.fixture(params=["each_expert", pytest.param("one_call", marks=SLOW)])
def product(request, monkeypatch) -> str:
    """Both forms of the product; torch's grouped product also exists on a CPU."""
    if request.param == "one_call":
        monkeypatch.setattr(kernels._OneCall, "suits", lambda _: True)
    return request.param


@EVERY
@pytest.mark.parametrize("spec", [AdapterSpec(rank=4), pytest.param(MLP, marks=SLOW)])
def test_logprobs_and_gradients_equal_peft(kind, spec, product, tmp_path, record_property):
    base = ref.load_base(ref.make_model(kind, tmp_path / "base"))
    base.require_covered(spec)
    data = ref.supervised(np.random.default_rng(0), base, (20, 11, 27, 5))
    run = ref.make_run(base, spec=spec)
    output = run.forward_backward(data, "cross_entropy")
    loss_of = ref.weighted(data)
    ref.errors_of(run, base, tmp_path, data, loss_of, output, record_property).check()


@SLOW
@EVERY
def test_samples_have_the_logprobs_of_peft(kind, tiny_base, tmp_path):
    base = tiny_base(kind)
    adapter = ref.random_adapter(base)
    prompt = np.arange(5, 25)
    found = ref.draw(Sampler(base, adapter), prompt, 4, SamplingSettings(max_tokens=12, seed=1))
    model = ref.peft_model(base, adapter, tmp_path)
    for sample in found:
        tokens = np.concatenate([prompt, sample.tokens])
        with torch.no_grad():
            expected = ref.reference_logprobs(model, tokens[:-1], tokens[1:])[len(prompt) - 1 :]
        np.testing.assert_allclose(sample.logprobs, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", *(pytest.param(k, marks=SLOW) for k in ref.ROUTED[1:])]
)
def test_multi_adapter_batch_equals_single(kind, product, tmp_path):
    """To the bit with packed matrices; torch's grouped product rounds with its number of rows."""
    base = ref.load_base(ref.make_model(kind, tmp_path))
    samplers = [
        Sampler(base, None),
        *(Sampler(base, ref.random_adapter(base, seed=n, size=0.1)) for n in (1, 2)),
        Sampler(base, ref.random_adapter(base, AdapterSpec(8, train_mlp=False), size=0.1)),
    ]

    def requests() -> list:
        settings = SamplingSettings(max_tokens=10, seed=3)
        prompts = [np.arange(5 + n, 20 + 2 * n) for n in range(len(samplers))]
        return [sample_request(*pair, 3, settings) for pair in zip(samplers, prompts, strict=True)]

    together = requests()
    ref.run_batch(base, together)
    for one, alone in zip(together, requests(), strict=True):
        ref.run_batch(base, [alone])
        pairs = zip(one.future.result(0), alone.future.result(0), strict=True)
        for sample, expected in pairs:
            assert sample.tokens == expected.tokens
            if product == "each_expert":
                assert sample.logprobs == expected.logprobs
            np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=1e-5)


def test_an_expert_without_tokens_has_no_gradient(tiny_base):
    base = tiny_base("qwen3_moe")
    run = ref.make_run(base, spec=MLP)
    item = ref.example(np.array([7, 8]), weights=np.ones(1))  # one token, two experts of four
    run.forward_backward([item], "cross_entropy")
    for target in run.adapter.targets:
        if target.experts:
            a = run._gradients[target.peft_name("A")].view(4, 4, -1).flatten(1)
            b = run._gradients[target.peft_name("B")].view(-1, 4, 4).permute(2, 0, 1).flatten(1)
            assert (a.norm(dim=1) > 0).sum() == (b.norm(dim=1) > 0).sum() == 2


def test_config_names_what_peft_must_not_rename(tiny_base):
    config = ref.random_adapter(tiny_base("deepseek_v3")).peft_config("m")
    attention = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_proj"]
    assert config["target_modules"] == sorted([*attention, "lm_head"])
    parts = ("gate_proj", "up_proj", "down_proj")
    assert set(config["target_parameters"]) == {
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        *(f"mlp.{part}.weight" for part in parts),
        *(f"mlp.shared_experts.{part}.weight" for part in parts),
    }
    targets = tiny_base("deepseek_v3").targets
    without = Adapter.create(AdapterSpec(4, train_mlp=False), targets, 0, ref.CPU)
    assert "target_parameters" not in without.peft_config("m")


def test_a_client_trains_saves_and_samples_experts(stories_model, tmp_path):
    """3 s: as a recipe does it, with the default flags."""
    folder = ref.make_model("qwen3_moe", tmp_path / "base")
    for file in Path(stories_model).glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    prompt = types.ModelInput.from_ints(list(range(5, 25)))
    datum = types.Datum(
        model_input=prompt,
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.arange(6, 26)),
            "weights": types.TensorData.from_numpy(np.ones(20, dtype=np.float32)),
        },
    )
    with LocalServiceClient(
        Engine("cpu", "float32"), CheckpointStore(tmp_path / "store")
    ) as service:
        client = service.create_lora_training_client(str(folder), rank=4, seed=1)
        losses = []
        for _ in range(4):
            output = client.forward_backward([datum], "cross_entropy").result()
            losses.append(output.metrics["loss:sum"])
            client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        assert losses[-1] < losses[0] - 1
        path = client.save_state("here").result().path
        again = service.create_training_client_from_state_with_optimizer(path)
        after = client.forward([datum], "cross_entropy").result().metrics["loss:sum"]
        loaded = again.forward([datum], "cross_entropy").result().metrics["loss:sum"]
        assert loaded == after
        sampler = client.save_weights_and_get_sampling_client()
        scores = sampler.compute_logprobs(prompt).result()
        trained = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        np.testing.assert_allclose(scores[1:], trained.data[:-1], atol=1e-5)
    (saved,) = (tmp_path / "store").rglob("weights/here/adapter_config.json")
    assert "mlp.experts.gate_up_proj" in json.loads(saved.read_text())["target_parameters"]
