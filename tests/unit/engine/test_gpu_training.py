"""Training on a pretended GPU with Liger's kernels: the CPU's numbers, and few kernels a layer."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch
import transformers as tf
from device_jobs import JOBS, adapter_of
from pretended_device import DEVICE, PretendedDevice

from tinker_cookbook.engine.extensions.joint import PassRequest, run_together
from tinker_cookbook.engine.model.base_model import BaseModel
from tinker_cookbook.engine.training.optimizer import AdamSettings
from tinker_cookbook.engine.training.run import LossOutput, TrainingRun

PARTS = {"llama": 7, "qwen3": 13, "gemma3": 19, "gpt_oss": 7, "qwen3_moe": 13}
"""Norms of a model of three layers, each of which becomes one kernel."""

JOBS_OF_TRAINING = [name for name in JOBS if not name.startswith(("sampling", "scoring"))]


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=() if kind == "gemma3" else pytest.mark.slow) for kind in PARTS
])  # fmt: skip
def test_liger_gives_the_numbers_of_the_cpu(tiny_base, tmp_path, kind):
    """Both kinds of gates; all of training for one model, and two passes for the others."""
    jobs = (
        JOBS_OF_TRAINING if kind == "llama" else ("ppo, shared rows", "cross_entropy, padded rows")
    )
    expected = {name: JOBS[name](tiny_base(kind)) for name in jobs}
    with PretendedDevice(liger=True) as device:
        base = ref.load_base(ref.make_model(kind, tmp_path), torch.float32, DEVICE)
        device.reset()
        with torch.no_grad():
            base.hidden(torch.arange(3, 20, device=DEVICE)[None])
        used = {name: count for name, count in device.kernels.items() if "liger" in name}
        assert used["liger norm"] == PARTS[kind]
        # gpt-oss rotates halves that are not repeated, which Liger's kernel does not compute.
        assert used.get("liger rope", 0) == (0 if kind == "gpt_oss" else 3)
        found = {name: JOBS[name](base) for name in jobs}
    for name, arrays in expected.items():
        for got, want in zip(found[name], arrays, strict=True):
            scale = max(float(np.nanmax(np.abs(want), initial=0.0)), 1e-6)
            np.testing.assert_allclose(got, want, atol=1e-4 * scale, rtol=0, err_msg=name)


def model_of(layers: int, folder) -> str:
    config = tf.Qwen3Config(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    folder.mkdir()
    tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def data_of(groups: int, members: int) -> list:
    """``groups`` prompts of 50 tokens with ``members`` answers of about 12 each."""
    rng, data = np.random.default_rng(0), []
    for group in range(groups):
        head = rng.integers(3, 1000, 50)
        for _ in range(members):
            tokens = np.concatenate([head, rng.integers(3, 1000, 12 + group % 3)])
            trained = np.arange(len(tokens)) > 45
            inputs = {"logprobs": np.full(len(tokens), -2.0), "advantages": trained}
            data.append(ref.example(tokens, target_tokens=np.roll(tokens, -1), **inputs))
    return data


def train_together(base: BaseModel, count: int) -> None:
    """A joint pass of ``count`` runs with adapters of rank 8."""
    runs = [TrainingRun(f"{n}", base, adapter_of(base, n), 100_000) for n in range(count)]
    outputs = dict(run_together([
        PassRequest(lambda run=run: run, lambda n=n: data_of(1 + n % 2, 2), "cispo")
        for n, run in enumerate(runs)
    ]))  # fmt: skip
    assert all(isinstance(output, LossOutput) for output in outputs.values())


@pytest.mark.slow  # 16 s
def test_kernels_of_a_layer_and_of_a_step(tmp_path, record_property):
    """The ceilings of a pass: the difference of two models is what their layers take."""
    cases = {"packed": data_of(8, 1), "shared": data_of(32, 2)}
    joint = {"masked": 4, "grouped": 20}
    ceilings = {"packed": 150, "shared": 300, "masked": 150, "grouped": 150}
    backends = {"packed": ("varlen", "causal"), "shared": ("flex", "blocks")}
    with PretendedDevice(liger=True) as device:
        counts = {}
        for layers in (2, 4):
            folder = model_of(layers, tmp_path / str(layers))
            base = ref.load_base(folder, torch.bfloat16, DEVICE)
            assert base.packs_rows
            assert base.shares_prefixes
            for case, data in cases.items():
                run = TrainingRun("run", base, adapter_of(base), 100_000)
                device.reset()
                run.forward_backward(data, "ppo")
                assert set(device.attention) == {backends[case]}
                assert device.attention[backends[case]] == layers
                counts[case, layers] = device.kernels.total()
                device.reset()
                run.optim_step(AdamSettings(grad_clip_norm=0.01))
                counts["step", layers] = device.kernels.total()
            for case, count in joint.items():
                device.reset()
                train_together(base, count)
                assert device.attention == {("flex", "blocks"): layers}
                assert (device.kernels["_grouped_mm"] > 0) == (case == "grouped")
                counts[case, layers] = device.kernels.total()
    for case in (*cases, *joint, "step"):
        of_layer = (counts[case, 4] - counts[case, 2]) / 2
        record_property(f"{case}: kernels a layer", of_layer)
        print(case, of_layer, counts[case, 2] - 2 * of_layer)
        assert of_layer <= ceilings.get(case, 80)
