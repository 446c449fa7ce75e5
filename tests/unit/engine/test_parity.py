"""Log-probabilities and gradients against plain transformers, peft and autograd."""

from __future__ import annotations

import engine_reference as ref
import numpy as np
import pytest
import torch

from tinker_cookbook.engine.model.lora import AdapterSpec
from tinker_cookbook.engine.training.run import TrainingRun

FLAGS = {
    "all": AdapterSpec(rank=4),
    "attn": AdapterSpec(rank=4, train_mlp=False, train_unembed=False),
    "mlp": AdapterSpec(rank=4, train_attn=False, train_unembed=False),
    "unembed": AdapterSpec(rank=4, train_attn=False, train_mlp=False),
}


@pytest.fixture
def base(request, tiny_base, stories_base):
    return stories_base if request.param == "stories" else tiny_base(request.param)


EVERY_BASE = pytest.mark.parametrize("base", ["stories", *ref.ARCHITECTURES], indirect=True)


def gradients_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    taken, run._gradients = run._gradients, {}
    return taken


@EVERY_BASE
@pytest.mark.parametrize("flags", FLAGS)
def test_logprobs_and_gradients_equal_peft(base, flags, tmp_path, record_property):
    rng = np.random.default_rng(0)
    data = ref.supervised(rng, base, (40, 23, 57, 8))
    run = ref.make_run(base, spec=FLAGS[flags])
    output = run.forward_backward(data, "cross_entropy")
    loss_of = ref.weighted(data)
    ref.errors_of(run, base, tmp_path, data, loss_of, output, record_property).check()


def rl_data(rng: np.random.Generator, base, run: TrainingRun, clip: bool) -> list:
    """Sampler log-probabilities scattered around the learner's, so that all clips occur."""
    data = []
    for length in (30, 17, 44):
        tokens = ref.text(base, rng, length + 1)
        item = ref.example(tokens, weights=np.zeros(length))
        lp = run.forward_backward([item], "cross_entropy", backward=False).logprobs[0]
        inputs = {
            "logprobs": lp + rng.normal(size=length) * 0.5,
            "advantages": rng.normal(size=length),
        }
        if clip:
            inputs["clip_low_threshold"] = rng.uniform(0.4, 0.9, length)
            inputs["clip_high_threshold"] = rng.uniform(1.1, 2.0, length)
        data.append(ref.example(tokens, **inputs))
    return data


CASES = {
    "importance_sampling": ("importance_sampling", {}, {}, False),
    "ppo": ("ppo", {}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, False),
    "ppo narrow": ("ppo", *[{"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}] * 2, False),
    "ppo per token": ("ppo", {}, {}, True),
    "cispo": ("cispo", {}, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, False),
    "cispo narrow": (
        "cispo",
        *[{"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}] * 2,
        False,
    ),
    "cispo per token": ("cispo", {}, {}, True),
    "dro": ("dro", {"beta": 0.05}, {"beta": 0.05}, False),
    "stable_reinforce": (
        "stable_reinforce",
        {"kl_coeff": 0.1},
        {"kl_coeff": 0.1, "clip_low_threshold": 0.0, "clip_high_threshold": 2.0},
        False,
    ),
    "gspo": ("gspo", *[{"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}] * 2, False),
    "gspo per token": ("gspo", {}, {}, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("base", ["stories", "gemma2"], indirect=True)
def test_every_rl_loss_equals_autograd_through_peft(base, case, tmp_path, record_property):
    name, given, config, per_token = CASES[case]
    rng = np.random.default_rng(1)
    run = ref.make_run(base)
    data = rl_data(rng, base, run, per_token)
    if name == "gspo":
        for item in data:
            mask = (rng.random(len(item)) < 0.7).astype(np.float32)
            item.inputs["sequence_ratio_mask"] = mask  # type: ignore[index]
    output = run.forward_backward(data, name, given)

    def loss_of(lps: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for lp, item in zip(lps, data, strict=True):
            inputs = {k: torch.from_numpy(v) for k, v in item.inputs.items()}
            total = total + ref.reference_loss(name, lp, inputs, config)
        return total

    ref.errors_of(run, base, tmp_path, data, loss_of, output, record_property).check()


@pytest.mark.parametrize("base", ["stories", "gemma2", "granite"], indirect=True)
def test_several_targets_a_position(base, tmp_path, record_property):
    """Top-K distillation: targets and weights [T, K]."""
    rng = np.random.default_rng(2)
    data = []
    for length in (21, 34):
        tokens = ref.text(base, rng, length)
        hidden = base.hidden(torch.from_numpy(tokens)[None])[0]
        likely = base.head.topk(hidden, 8, None)[1].numpy()  # as a teacher's would be
        targets = rng.permuted(likely, axis=1)[:, :5].copy()
        targets[:, 1] = targets[:, 0]  # the same token twice must count twice
        weights = rng.normal(size=(length, 5))
        weights[:6] = 0
        data.append(ref.example(tokens, target_tokens=targets, weights=weights))
    run = ref.make_run(base)
    output = run.forward_backward(data, "cross_entropy")
    loss_of = ref.weighted(data)
    ref.errors_of(run, base, tmp_path, data, loss_of, output, record_property).check()


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_custom_loss_equals_autograd_through_peft(stories_base, budget, tmp_path, record_property):
    """A loss over pairs of sequences (DPO's shape), which no per-token weight expresses."""
    rng = np.random.default_rng(3)
    data = ref.supervised(rng, stories_base, (20, 33, 15, 27))

    def loss_fn(lps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        margins = [lps[0].sum() - lps[1].sum(), lps[2].sum() - lps[3].sum()]
        value = -torch.nn.functional.logsigmoid(0.1 * torch.stack(margins)).mean()
        return value, {"margin": float(margins[0])}

    run = ref.make_run(stories_base, budget)
    output = run.forward_backward_custom(data, lambda _, lps: loss_fn(lps))
    margins = []

    def loss_of(lps: list[torch.Tensor]) -> torch.Tensor:
        value, metrics = loss_fn(lps)
        margins.append(metrics["margin"])
        return value

    ref.errors_of(run, stories_base, tmp_path, data, loss_of, output, record_property).check()
    assert output.metrics["margin"] == pytest.approx(margins[0], rel=1e-4)
